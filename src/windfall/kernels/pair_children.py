"""The children of nodes drafted by a block head: the candidates of a level, corrected by pair scores and sorted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton
from windfall.kernels.levels import MIN_REST, Levels, PairTables


class PairCandidates(NamedTuple):
    """The children of n nodes, not computed yet. Tokens that are no candidates keep their share of the rest."""

    levels: Levels
    rows: Tensor  # [n] long: the row of each node's children in `levels`; negative: it has none
    previous: Tensor  # [n] long: the token of each node
    tables: PairTables | None  # None: there are no pair scores
    scale: Tensor | None = None  # fp32: factor of the pair scores, [1] or with `owners` [N]; None: 1
    owners: Tensor | None = None  # [n] integers: the request of each node
    entropy_levels: Levels | None = None  # without noise, and with `rest`; for entropies

    def children(self, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest children and their log-probabilities; -inf where there are fewer."""
        values, tokens = pair_children(self)
        if (count := values.shape[1]) < k:
            return torch.nn.functional.pad(values, (0, k - count), value=-torch.inf), torch.nn.functional.pad(
                tokens, (0, k - count)
            )
        return (values, tokens) if count == k else (values[:, :k].contiguous(), tokens[:, :k].contiguous())

    def entropy(self) -> Tensor:
        """Of the distribution after each node, without noise, [n] nats."""
        levels, own = self.entropy_levels, self.rows.clamp(min=0)
        assert levels is not None and levels.rest is not None
        logq = pair_children(self._replace(levels=levels, scale=None))[0]
        share = (1 - logq.exp().sum(-1)).clamp(min=0)
        before = (1 - levels.logq[own].exp().sum(-1)).clamp(min=MIN_REST)
        lost = before.log() - share.clamp(min=MIN_REST).log()  # what normalising took from the rest
        found: Tensor = torch.special.entr(logq.exp()).sum(-1) + share * (lost - levels.rest[own])
        return found.nan_to_num()


def pair_children(given: PairCandidates) -> tuple[Tensor, Tensor]:
    """The candidates' log-probabilities after each node, highest first, and their tokens → [n, C] fp32, [n, C] long.

    Without a row, all are -inf.
    """
    if on_triton(given.levels.logq):
        from windfall.kernels.triton.pair_children import pair_children as run
    else:
        run = reference
    return run(*given[:-1])


def reference(
    levels: Levels,
    rows: Tensor,
    previous: Tensor,
    tables: PairTables | None,
    scale: Tensor | None = None,
    owners: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`pair_children` with torch."""
    own = rows.clamp(min=0)
    logq, tokens = levels.logq[own], levels.tokens[own]
    rest = (1 - logq.exp().sum(-1, keepdim=True)).clamp(min=MIN_REST).log()
    if tables is not None:
        query = tables.before[previous].float()
        query = query if levels.hidden is None else query * levels.hidden[own].float()
        scores = (query[:, None] * tables.after[tokens].float()).sum(-1)
        if scale is not None:
            scores = scores * (scale if owners is None else scale[owners.long()][:, None])
        logq = logq + scores
    logq = torch.cat([logq, rest], -1).log_softmax(-1)[:, :-1]
    logq = logq.masked_fill((rows < 0)[:, None], -torch.inf)
    values, order = logq.sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)
