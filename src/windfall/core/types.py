"""The immutable values that the parts exchange: sampling parameters, draft requests, verdicts, steps."""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from windfall.core.constraint import Constraint
from windfall.core.errors import InputError as InputError
from windfall.core.logprobs import MODES, RAW, TokenLogprob
from windfall.core.options import is_number, require_flag
from windfall.core.step import Counts as Counts
from windfall.core.step import Split as Split
from windfall.core.step import Step as Step

MIN_TEMPERATURE = 1e-6  # below it decoding is greedy: dividing logits by less can overflow
MAX_NUMBER = 1e30  # of penalties, biases and the temperature, which fp32 logits are combined with
FULL_PRECISION = (torch.float32, torch.float64)  # dtypes in which every text equals plain decoding's
INTEGER_FIELDS = ("max_new_tokens", "top_k")
NUMBER_FIELDS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def fresh_seed() -> int:
    """A random seed from the operating system, short enough to be typed."""
    return secrets.randbits(32)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InputError(message)


def _copied(callback: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with its own state; models are shared with the original."""
    models = {id(part): part for part in getattr(callback, "__dict__", {}).values() if isinstance(part, nn.Module)}
    try:
        return copy.deepcopy(callback, models)
    except Exception as error:
        raise InputError(
            f"{type(callback).__name__} cannot be copied for each prompt of a batch ({error}); generate one at a time"
        ) from error


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn from the target's logits, and when to stop. Temperature 0, or next to it, is greedy."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as in transformers
    presence_penalty: float = 0.0  # over the output alone, as in OpenAI's API
    frequency_penalty: float = 0.0  # over the output alone
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    eos: tuple[int, ...] | None = None  # None: the model's own end-of-text ids; (): never stop at one
    seed: int | None = None  # of the draws; None: a fresh one for each text
    processors: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()  # transformers LogitsProcessors, before temperature
    criteria: tuple[Callable[..., Any], ...] = ()  # transformers StoppingCriteria, asked after every token
    constraint: Constraint | None = None  # what the text must follow, such as a JSON schema
    logprobs: int | None = None  # log-probabilities of new tokens, with this many of the likeliest; None: none
    logprobs_mode: str = RAW  # "raw": of the model; "processed": after bias, penalties, temperature and filters
    prompt_logprobs: int | None = None  # the same as `logprobs` for the tokens of the prompt, always raw

    def __post_init__(self) -> None:
        _require(isinstance(self.stop or (), Iterable), "stop takes strings")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "logit_bias", self.logit_bias or {})
        if isinstance(self.eos, int):
            object.__setattr__(self, "eos", (self.eos,))
        for name in INTEGER_FIELDS:
            _require(is_number(getattr(self, name), whole=True), f"{name} must be a whole number")
        given = self.constraint
        _require(isinstance(given, Constraint | None), f"constraint takes a windfall Constraint, not {given!r}")
        _require(self.seed is None or is_number(self.seed, whole=True), "seed must be a whole number, or None")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            known = count is None or (is_number(count, whole=True) and count >= 0)
            _require(known, f"{name} must be a whole number of at least 0, or None, not {count!r}")
        _require(self.logprobs_mode in MODES, f"logprobs_mode must be 'raw' or 'processed', not {self.logprobs_mode!r}")
        for name in NUMBER_FIELDS:
            _require(is_number(getattr(self, name)), f"{name} must be a number, not {getattr(self, name)!r}")
        _require(all(isinstance(each, str) for each in self.stop), "stop takes strings")
        _require(all(isinstance(each, int) for each in self.eos or ()), "eos takes token ids")
        known = isinstance(self.logit_bias, Mapping) and all(isinstance(token, int) for token in self.logit_bias)
        _require(known, "logit_bias takes {token id: number added to its logit}")
        _require(self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        _require(self.temperature >= 0, f"temperature must be 0 (greedy) or more, not {self.temperature}")
        _require(self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}")
        _require(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min_p must be between 0 and 1, not {self.min_p}")
        _require(self.repetition_penalty > 0, f"repetition_penalty must be above 0, not {self.repetition_penalty}")
        _require(all(self.stop), "a stop string must not be empty")
        for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _require(
                abs(getattr(self, name)) <= MAX_NUMBER,
                f"{name} must lie between {-MAX_NUMBER:g} and {MAX_NUMBER:g}",
            )
        biases = self.logit_bias.values()
        _require(
            all(is_number(bias) and (abs(bias) <= MAX_NUMBER or bias == -math.inf) for bias in biases),
            f"logit_bias values must be numbers between {-MAX_NUMBER:g} and {MAX_NUMBER:g}, or -inf to exclude a token",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    def seeded(self) -> SamplingParams:
        """These parameters with a seed: a fresh one if none is set and tokens are drawn at random."""
        return replace(self, seed=fresh_seed()) if self.seed is None and not self.greedy else self

    def with_own_state(self) -> SamplingParams:
        """These parameters with copies of the processors and criteria, whose state belongs to one text of a batch."""
        if not (self.processors or self.criteria):
            return self
        return replace(
            self, processors=tuple(map(_copied, self.processors)), criteria=tuple(map(_copied, self.criteria))
        )

    @property
    def noise_seed(self) -> int:
        """The seed of the noise; 0 if it is unset in greedy decoding, which has no noise."""
        if self.seed is None and not self.greedy:
            raise ValueError("these sampling parameters have no seed yet; `seeded` gives them one")
        return self.seed or 0

    @property
    def filters(self) -> bool:
        """Whether unlikely tokens are excluded."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def reads_prefix(self) -> bool:
        """Whether a row's logits depend on the tokens before it (and not on the model alone)."""
        return bool(self.processors or self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def needs_host(self) -> bool:
        """Whether draws need more than the logits, the noise and the filters, which is all that a GPU's loop knows."""
        return bool(self.reads_prefix or self.logit_bias or self.constraint)

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are computed, of new tokens or of the prompt."""
        return self.logprobs is not None or self.prompt_logprobs is not None


@dataclass(frozen=True)
class GpuOptions:
    """Options of decoding on a GPU."""

    graphs: bool | None = None  # run passes as CUDA graphs; None: if there is a GPU
    compiled: bool = False  # use torch.compile for models without a fused forward
    exact: bool = True  # compute every row in one order, for plain decoding's text in half precision; False: faster
    plans: bool = True  # run policies that have a plan on the GPU; False: all decide on the host
    pages: bool = True  # run several requests in CUDA graphs on a KV cache in pages; False: kernel by kernel

    def __post_init__(self) -> None:
        _require(isinstance(self.graphs, bool | None), f"graphs must be True, False or None, not {self.graphs!r}")
        for name in ("compiled", "exact", "plans", "pages"):
            require_flag(name.removesuffix("d"), getattr(self, name))


class Grow(NamedTuple):
    """A policy's request for one draft pass: give each of these unexpanded nodes its `k` most likely children."""

    nodes: Tensor  # [n] long, indices into the tree, any depths
    k: int
    entropy: bool = False  # also compute the drafter's entropy after these nodes


class Verdict(NamedTuple):
    """The accepted nodes, from the root down, and the target's own next token."""

    path: Tensor  # [a] long, path[0] == 0
    bonus: int
    logprobs: tuple[TokenLogprob, ...] | None = None  # of the tokens of path[1:] and of the bonus, if they are wanted


class Scores(NamedTuple):
    """The target's outputs for a tree, one row per node."""

    logits: Tensor  # [N, V]
    hidden: Tensor | None  # [N, taps * H], if the drafter reads hidden states
    draws: list[int] | None = None  # [N] the target's next token after each node, if the pass drew it
