"""The levels of trees that a block head predicts at once, as the kernels see them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MIN_REST = 1e-7  # probability of all tokens that are no candidates


class PairTables(NamedTuple):
    """The score of token b after token a is the inner product of a query, which depends on a, and after[b].

    With m parts, the query of token a at a level, whose state is `hidden`, is

    - m = 1: before[a] * hidden
    - m = 2: sigmoid(gate + hidden) * value, where before[a] are gate and value
    - m = 3: the result of `recur` for before[a] + hidden + carried @ carry, where the carry is that of a's parent
    """

    before: Tensor  # [V, m * R]
    after: Tensor  # [V, R]: zeros for tokens that are not drafted
    carried: Tensor | None = None  # [3R, R]

    @property
    def rank(self) -> int:
        return self.after.shape[1]

    @property
    def parts(self) -> int:
        """m"""
        return self.before.shape[1] // self.rank


def recur(joint: Tensor, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """The query and the next state [.., R] of a gated recurrence; joint [.., 3R]: gate, new state and query."""
    gate, fresh, query = joint.chunk(3, -1)
    gate, fresh = torch.sigmoid(gate), torch.tanh(fresh)
    return torch.tanh(query), (1 - gate) * fresh if carry is None else gate * carry + (1 - gate) * fresh


class Carries(NamedTuple):
    """What paths carry into their pair scores."""

    states: Tensor  # [S, R] fp32, by slot
    above: Tensor | None  # [n] long: the slot of each node's parent; None: nothing is carried
    here: Tensor  # [n] long: the slot of each node, which is written


class Levels(NamedTuple):
    """What a block head predicts for each of its rows: L levels for each of N requests, as rows N * L."""

    logq: Tensor  # [N * L, C] fp32: log-probabilities of the candidates, without pair scores
    tokens: Tensor  # [N * L, C] long
    hidden: Tensor | None = None  # [N * L, R or 3R]; None: the state of a level does not matter
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
