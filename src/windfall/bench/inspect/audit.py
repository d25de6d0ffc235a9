"""Where speculative texts differ from plain decoding's: how many do, at which token, and by which logit gap.

For comparison, the same is measured for transformers' own `generate` in a padded batch against single prompts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from windfall.bench.hf_generate import hf_generate
from windfall.bench.runner import Case, NoDrafter
from windfall.core.sampling import gumbel, process
from windfall.core.stats import first_difference
from windfall.core.tree import DraftTree
from windfall.core.types import FULL_PRECISION, SamplingParams
from windfall.engine.engine import Engine
from windfall.model.target import Target
from windfall.policies.none import NoSpeculation

Tokens = list[int]
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Divergence:
    """The first token of an answer that differs."""

    place: int  # in the answer, from 0
    token: int | None  # the reference's; None: its answer had ended
    other: int | None
    gap: float | None  # logit of `token` less that of `other`, after the same prefix; None where one answer had ended


@dataclass(frozen=True)
class Outcome:
    """One conversation decoded in two ways."""

    task: str
    id: str
    tokens: int  # the equal tokens and the first that differs: those chosen after the same prefix
    divergence: Divergence | None


@dataclass
class Comparison:
    """A way of decoding against its reference, over all conversations."""

    name: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def diverging(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.divergence]

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.outcomes)

    @property
    def conversation_rate(self) -> float | None:
        return len(self.diverging) / len(self.outcomes) if self.outcomes else None

    @property
    def token_rate(self) -> float | None:
        """First divergences per token chosen after the same prefix."""
        return len(self.diverging) / self.tokens if self.tokens else None

    @property
    def gaps(self) -> list[float]:
        """Sizes of the logit gaps at the first divergences, smallest first."""
        found = [each.divergence.gap for each in self.outcomes if each.divergence]
        return sorted(abs(gap) for gap in found if gap is not None)

    @property
    def median_gap(self) -> float | None:
        return statistics.median(self.gaps) if self.gaps else None

    @property
    def largest_gap(self) -> float | None:
        return self.gaps[-1] if self.gaps else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "conversations": len(self.outcomes),
            "diverging": len(self.diverging),
            "conversation_rate": self.conversation_rate,
            "tokens": self.tokens,
            "token_rate": self.token_rate,
            "gap": {"median": self.median_gap, "max": self.largest_gap},
            "divergences": [asdict(each) for each in self.diverging],
        }


class Audit:
    """Decodes conversations plainly, with speculation, and with `generate` one by one and in batches.

    `comparisons` has the differences found so far, also when `run` is interrupted.
    """

    def __init__(self, engine: Engine, name: str = "speculation", batch: int = 8):
        self.engine, self.batch = engine, batch
        target = engine.target
        self.reference = Target(target.model, target.tokenizer, target.name)  # has its own cache
        self.plain = Engine(self.reference, NoDrafter(), NoSpeculation(), gpu_options=engine.gpu_options)
        self.speculative = Comparison(f"{name} vs plain")
        self.batched = Comparison(f"HF batch of {batch} vs single")
        self.others = Comparison("plain vs HF single")

    @property
    def comparisons(self) -> list[Comparison]:
        """The comparisons with an outcome, and always that of speculation."""
        return [self.speculative, *(each for each in (self.batched, self.others) if each.outcomes)]

    @property
    def exact_passes(self) -> bool:
        """Whether both engines decode single texts in exact passes."""
        return self.engine.exact_passes and self.plain.exact_passes

    @property
    def exact(self) -> bool:
        """Whether every text must equal plain decoding's: in float32 and float64, and with exact passes."""
        return self.reference.decoder.dtype in FULL_PRECISION or self.exact_passes

    @property
    def failed(self) -> bool:
        """Whether a text differs although none should."""
        return self.exact and bool(self.speculative.diverging)

    def run(self, cases: Sequence[Case], progress: Progress = lambda share: None) -> None:
        steps = _counted(progress, len(cases) * (4 if self.batch > 1 else 2))
        for start in range(0, len(cases), self.batch):
            chunk = cases[start : start + self.batch]
            plain = [self._speculate(case, steps) for case in chunk]
            if self.batch > 1:
                self._measure_generate(chunk, plain, steps)

    def _speculate(self, case: Case, steps: Iterator[None]) -> Tokens:
        """Decode in both ways and compare; returns the plain answer."""
        plain = self._answer(self.plain, case, steps)
        self._compare(self.speculative, case, plain, self._answer(self.engine, case, steps))
        return plain

    def _answer(self, engine: Engine, case: Case, steps: Iterator[None]) -> Tokens:
        [made] = engine.decode([case.ids], [case.params])
        engine.target.decoder.reset(0)
        next(steps)
        return made.token_ids

    def _measure_generate(self, chunk: Sequence[Case], plain: Sequence[Tokens], steps: Iterator[None]) -> None:
        """Decode the same conversations greedily with `generate`: one by one, then in one batch."""
        greedy = [replace(case, params=case.at(0.0)) for case in chunk]
        alone = []
        for case, drawn, own in zip(greedy, chunk, plain, strict=True):
            alone += hf_generate(self.reference, [case.ids], case.params)
            next(steps)
            if drawn.params.greedy:
                self._compare(self.others, case, alone[-1], own)
        prompts = [case.ids for case in greedy]
        together = hf_generate(self.reference, prompts, greedy[0].params) if len(greedy) > 1 else []
        for case, one, other in zip(greedy, alone, together, strict=False):
            self._compare(self.batched, case, one, other)
        for _ in chunk:
            next(steps)

    def _compare(self, comparison: Comparison, case: Case, one: Tokens, other: Tokens) -> None:
        place = first_difference(one, other)
        found = None if place is None else self._divergence(case, one, other, place)
        tokens = len(one) if place is None else place + 1
        comparison.outcomes.append(Outcome(case.prompt.task, case.prompt.id, tokens, found))

    def _divergence(self, case: Case, one: Tokens, other: Tokens, place: int) -> Divergence:
        token, instead = (tokens[place] if place < len(tokens) else None for tokens in (one, other))
        gap = None
        if token is not None and instead is not None:
            gap = logit_gap(self.reference, [*case.ids, *one[:place]], token, instead, case.params)
        return Divergence(place, token, instead, gap)


@torch.inference_mode()
def logit_gap(target: Target, prefix: Tokens, token: int, other: int, params: SamplingParams) -> float:
    """By how much the target prefers `token` to `other` after the prefix, which is read in one pass.

    At temperature above 0 the gap includes the sampling noise: it is the gap that decides the draw, in logits.
    """
    target.prefill([prefix])
    [scores] = target.score([DraftTree.root(prefix[-1])])
    target.decoder.reset(0)
    row = process(scores.logits[:1], None, len(prefix), params)
    if not params.greedy:
        at, vocabulary = torch.tensor([len(prefix)], device=row.device), torch.arange(row.shape[1], device=row.device)
        row = (row + gumbel(params.noise_seed, at, vocabulary)) * params.temperature
    return float(row[0, token] - row[0, other])


def _counted(progress: Progress, total: int) -> Iterator[None]:
    """Report the finished share at every step."""
    for done in range(1, total + 1):
        progress(done / total)
        yield
