"""Sampling: from logits to tokens.

The noise of a draw depends on (seed, position, token) only. So the same seed gives the same text, independent of the
drafts, the batch and the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from windfall.core.cutoff import cutoffs
from windfall.core.logprobs import PROCESSED
from windfall.core.tree import DraftTree
from windfall.core.types import FULL_PRECISION, SamplingParams


def signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch stores it in."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


GOLDEN = signed(0x9E3779B97F4A7C15)  # splitmix64: Steele, Lea & Flood 2014
EULER = 0.5772156649  # the mean of Gumbel noise
MIX_FACTORS = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def shift(x: Tensor, bits: int) -> Tensor:
    """A logical right shift; `>>` on int64 keeps the sign."""
    return (x >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64."""
    x = (x ^ shift(x, 30)).mul_(MIX_FACTORS[0])
    x = x.bitwise_xor_(shift(x, 27)).mul_(MIX_FACTORS[1])
    return x.bitwise_xor_(shift(x, 31))


def noise_bits(seed: int, positions: Tensor, tokens: Tensor) -> Tensor:
    """64 hashed bits for each (position, token): positions [n], tokens [V] or [n, V] → [n, V] int64, on any device."""
    start = mix(torch.tensor(signed(seed), device=positions.device))
    key = mix(start + (positions + 1) * GOLDEN)
    return mix(key[:, None] + (tokens + 1) * GOLDEN)


def gumbel(seed: int, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise [n, V] fp32; computed in fp64, so that devices agree after rounding."""
    if positions.device.type == "mps":  # has no fp64
        return gumbel(seed, positions.cpu(), tokens.cpu()).to(positions.device)
    uniform = (shift(noise_bits(seed, positions, tokens), 12).double() + 0.5) * 2.0**-52  # inside (0, 1)
    return uniform.log_().neg_().log_().neg_().float()


class TokenCounts(NamedTuple):
    """How many times each token occurs before each row, [n, V] or [V]; None where no penalty needs it."""

    text: Tensor | None  # in prompt and output
    output: Tensor | None  # in the output alone

    @classmethod
    def zeros(cls, logits: Tensor, params: SamplingParams) -> TokenCounts:
        """Of no tokens, with the shape of these logits."""
        counts_output = params.presence_penalty or params.frequency_penalty
        zeros = torch.zeros_like(logits)
        return cls(zeros if params.repetition_penalty != 1 else None, zeros if counts_output else None)


def process(
    logits: Tensor,
    prefix: Tensor | None,
    prompt_length: int,
    params: SamplingParams,
    mask: Tensor | None = None,
    counts: TokenCounts | None = None,
) -> Tensor:
    """Apply bias, penalties, processors, the mask, temperature, top-k, top-p and min-p.

    logits [n, V]; prefix [n, L] holds the tokens before each row (needed only if `params.reads_prefix`); mask [V] says
    which tokens are allowed, None: all. With the `counts` of the prefix, only processors need the prefix itself.
    Returns new logits, -inf where a token is excluded; at temperature 0 only their order matters.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if params.logit_bias:
        logits = logits.clone()
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[:, ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device, dtype=logits.dtype)
    if params.reads_prefix:
        if counts is None:
            assert prefix is not None
            logits = _penalise(logits, prefix, prompt_length, params)
        else:
            logits = _penalise_counted(logits, counts, params)
        for processor in params.processors:
            assert prefix is not None
            logits = processor(prefix, logits)
    if mask is not None:
        logits = logits.masked_fill(~mask.to(logits.device), -torch.inf)
    if params.greedy:
        return logits
    temperature = logits.new_full((1,), params.temperature)  # a tensor, because CUDA divides by a number inexactly
    return warp(logits, params) / temperature


def _penalise(logits: Tensor, prefix: Tensor, prompt_length: int, params: SamplingParams) -> Tensor:
    if params.repetition_penalty != 1:
        seen = logits.gather(1, prefix)
        seen = torch.where(seen < 0, seen * params.repetition_penalty, seen / params.repetition_penalty)
        logits = logits.scatter(1, prefix, seen)
    if params.presence_penalty or params.frequency_penalty:
        output = prefix[:, prompt_length:]
        counts = torch.zeros_like(logits).scatter_add_(1, output, torch.ones_like(output, dtype=logits.dtype))
        logits = logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return logits


def _penalise_counted(logits: Tensor, counts: TokenCounts, params: SamplingParams) -> Tensor:
    """The same. It takes longer for a row on a CPU; on a GPU, sending the prefix of each row takes longest."""
    text, output = counts
    if text is not None:
        seen = torch.where(logits < 0, logits * params.repetition_penalty, logits / params.repetition_penalty)
        logits = torch.where(text > 0, seen, logits)
    if output is not None:
        logits = logits - params.frequency_penalty * output - params.presence_penalty * (output > 0)
    return logits


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """Exclude tokens (-inf) by top-k, top-p and min-p, which follow the temperature; the other logits stay as they are.

    Tokens that tie with the last one that is kept are kept, too.
    """
    if 0 < params.top_k < logits.shape[-1]:  # selecting is faster than sorting
        lowest = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if params.top_p < 1 or params.min_p > 0:
        settings = params.temperature, params.top_p, params.min_p
        temperature, top_p, min_p = torch.tensor(settings, dtype=torch.float32, device=logits.device)[:, None]
        cutoff = cutoffs(logits, temperature, None, top_p if params.top_p < 1 else None, min_p)
        logits = logits.masked_fill(logits < cutoff[:, None], -torch.inf)
    return logits


class Dice:
    """The noise of a sequence's future draws, which lets the drafter guess the draw itself (coupled drafting).

    After Daliri, Musco & Suresh 2024 (drafter-invariant decoding), here for trees. Verification is the same, so the
    text cannot change; more of the drafted tokens are accepted.
    """

    def __init__(self, params: SamplingParams, committed: list[int]):
        self.params = params
        self.committed = committed  # the sequence's own list, which grows
        self.kappa = 1.0  # above 1: the drafter's distribution counts less

    def couple(self, logq: Tensor, depths: Tensor, tokens: Tensor | None) -> Tensor:
        """Draft log-probabilities [n, M] after nodes of these depths → log-probabilities that each token is drawn."""
        if tokens is None or tokens.dim() == 1:
            return torch.log_softmax(self.race(logq, depths, tokens), -1)
        rest = (1 - logq.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log()  # of all other tokens
        known = torch.cat([logq, rest], -1).div(self.params.temperature).log_softmax(-1)
        noise = gumbel(self.params.noise_seed, self._positions(depths, logq.device), tokens)
        noise = torch.cat([noise, torch.full_like(rest, EULER)], -1)  # the best of the others gets the mean noise
        return torch.log_softmax((known + noise) / self.kappa, -1)[:, :-1]

    def race(self, logq: Tensor, depths: Tensor, tokens: Tensor | None) -> Tensor:
        """Draft logits [n, M] of all tokens that can be drafted → scores whose softmax `couple` returns."""
        scores = warp(logq, self.params) / self.params.temperature
        names = _vocabulary(logq) if tokens is None else tokens
        noise = gumbel(self.params.noise_seed, self._positions(depths, logq.device), names)
        return (scores.log_softmax(-1) + noise) / self.kappa

    @property
    def weight(self) -> float:
        """What adding 1 to a logit adds to its score in `race`."""
        return 1 / (self.params.temperature * self.kappa)

    def _positions(self, depths: Tensor, device: torch.device) -> Tensor:
        """Positions in the text of the tokens after nodes of these depths."""
        return (len(self.committed) + depths).to(device)


class Sampler:
    """Draws the tokens of one sequence."""

    def __init__(self, params: SamplingParams, prompt_length: int):
        self.params = params
        self.prompt_length = prompt_length
        self._processed: dict[int, Tensor] = {}  # node → processed logits [V], if log-probabilities need them
        self._counted = 0  # tokens of the text that `_counts` has
        self._counts: TokenCounts | None = None  # [V] each

    def draws(self, tree: DraftTree, logits: Tensor, committed: list[int]) -> Callable[[int], int]:
        """A function from node to the target's token after that node.

        On a CPU, or with processors, it draws on demand, so that only visited nodes are processed, in order. On a GPU
        all nodes are drawn at once.
        """
        self.forget_processed()
        if logits.device.type == "cpu" and self._takes_largest and logits.dtype in FULL_PRECISION:
            rows = logits.numpy()  # whose argmax is much quicker than torch for one row
            return lambda node: int(rows[node].argmax())
        if logits.device.type == "cpu" or self.params.processors:
            return lambda node: int(self._draw(tree, logits, committed, torch.tensor([node])))
        return self._draw(tree, logits, committed, torch.arange(len(tree))).tolist().__getitem__

    @property
    def _takes_largest(self) -> bool:
        """Whether draws take the largest logit, as it is."""
        return self.params.greedy and not (self.params.reads_prefix or self.params.logit_bias)

    def forget_processed(self) -> None:
        """A new pass begins: processed logits of the last one mean nothing for its tree."""
        self._processed = {}

    def draw_masked(self, tree: DraftTree, logits: Tensor, committed: list[int], node: int, mask: Tensor) -> int:
        """The token that follows a node, one of those that the mask [V] allows."""
        return int(self._draw(tree, logits, committed, torch.tensor([node]), mask))

    def _draw(
        self, tree: DraftTree, logits: Tensor, committed: list[int], nodes: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """The tokens that follow these nodes [n]. On a CPU, and with processors, they have one depth."""
        whole = len(nodes) == len(tree) and not self.params.processors  # which may write into their input
        rows = logits if whole else logits[nodes.to(logits.device)]
        prefix, counts = None, None
        if self.params.processors or (self.params.reads_prefix and logits.device.type == "cpu"):
            prefix = self._prefixes(tree, committed, nodes, logits.device)
        elif self.params.reads_prefix:
            counts = self._counts_before(tree, committed, nodes, rows)
        rows = process(rows, prefix, self.prompt_length, self.params, mask, counts)
        if self.params.logprobs is not None and self.params.logprobs_mode == PROCESSED:
            self._processed.update(zip(nodes.tolist(), rows, strict=True))
        return self.pick(rows, len(committed) + tree.depth[nodes])

    def scored(self, logits: Tensor, path: Tensor) -> Tensor:
        """The logits [a, V] of the accepted nodes, for log-probabilities."""
        if self._processed:
            return torch.stack([self._processed[node] for node in path.tolist()])
        rows = logits[path.to(logits.device)]
        if self.params.logprobs_mode == PROCESSED:  # the pass itself drew, which it does if the logits alone decide
            return process(rows, None, self.prompt_length, self.params)
        return rows

    def pick(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Draw a token from each row of processed logits [n, V], for these positions of the text [n]."""
        if not self.params.greedy:
            rows = rows + gumbel(self.params.noise_seed, positions.to(rows.device), _vocabulary(rows))
        return rows.argmax(-1)

    def _counts_before(self, tree: DraftTree, committed: list[int], nodes: Tensor, rows: Tensor) -> TokenCounts:
        """The counts of the tokens before each of these rows [n, V]: of the text, which are kept, and of the paths."""
        if self._counts is None or self._counted > len(committed):
            precise = torch.promote_types(rows.dtype, torch.float32)
            self._counts, self._counted = TokenCounts.zeros(rows[0].to(precise), self.params), 0
        text, output = self._counts
        first = max(self._counted, self.prompt_length)
        text, output = _added(text, committed[self._counted :]), _added(output, committed[first:])
        self._counts, self._counted = TokenCounts(text, output), len(committed)
        tokens = tree.tokens.tolist()
        paths = [[tokens[node] for node in tree.path(node)[1:]] for node in nodes.tolist()]
        return TokenCounts(_with_paths(text, paths), _with_paths(output, paths))

    @staticmethod
    def _prefixes(tree: DraftTree, committed: list[int], nodes: Tensor, device: torch.device) -> Tensor:
        tokens = tree.tokens.tolist()
        paths = [committed + [tokens[i] for i in tree.path(node)[1:]] for node in nodes.tolist()]
        return torch.tensor(paths, device=device)


def _added(counts: Tensor | None, tokens: list[int]) -> Tensor | None:
    """Counts [V] with these tokens more."""
    if counts is None or not tokens:
        return counts
    return counts.index_add(0, torch.tensor(tokens, device=counts.device), counts.new_ones(len(tokens)))


def _with_paths(counts: Tensor | None, paths: list[list[int]]) -> Tensor | None:
    """Counts [V] with the tokens of each path more, [paths, V]."""
    if counts is None:
        return None
    places = [(row, token) for row, path in enumerate(paths) for token in path]
    if not places:
        return counts.expand(len(paths), -1)
    index = torch.tensor(places, device=counts.device).unbind(1)
    return counts.repeat(len(paths), 1).index_put(index, counts.new_ones(len(places)), accumulate=True)


def _vocabulary(rows: Tensor) -> Tensor:
    return torch.arange(rows.shape[-1], device=rows.device)
