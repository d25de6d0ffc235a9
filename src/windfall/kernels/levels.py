"""The levels of trees that a block head predicts at once, as the kernels see them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MIN_REST = 1e-7  # probability of all tokens that are no candidates


class PairTables(NamedTuple):
    """The score of token b after token a is Σ before[a] * hidden * after[b], over the rank R."""

    before: Tensor  # [V, R]
    after: Tensor  # [V, R]: zeros for tokens that are not drafted


class Levels(NamedTuple):
    """What a block head predicts for each of its rows: L levels for each of N requests, as rows N * L."""

    logq: Tensor  # [N * L, C] fp32: log-probabilities of the candidates, without pair scores
    tokens: Tensor  # [N * L, C] long
    hidden: Tensor | None = None  # [N * L, R]; None: the same as ones
    rest: Tensor | None = None  # [N * L] fp32: mean log-probability of all other tokens
    depth: int = 1  # L

    @property
    def candidates(self) -> int:
        """Candidates of a level."""
        return self.logq.shape[1]

    def fill_rest(self, logits: Tensor) -> None:
        """Write `rest`, once the candidates are known, from the logits [N * L, V] of all tokens."""
        assert self.rest is not None
        chances, own = logits.float().softmax(-1), self.logq.exp()
        rest = torch.special.entr(own).sum(-1) - torch.special.entr(chances).sum(-1)  # of probability * logarithm
        self.rest.copy_(rest / (1 - own.sum(-1)).clamp(min=MIN_REST))
