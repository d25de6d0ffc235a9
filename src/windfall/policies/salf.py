"""Stopping at low further gains (SALF & TALF, Algorithm 2): a best-first tree, until going on promises too little."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from windfall.context import Context
from windfall.options import option
from windfall.policies.base import TreePolicy, best
from windfall.records import Grow
from windfall.tree import DraftTree


@dataclass
class Salf(TreePolicy):
    """Expand the `width` likeliest unexpanded nodes, of any depths, in one pass; stop when their summed path
    probability falls below `th`.

    At th=0 this is the optimal tree search: the `nodes` likeliest nodes of the whole infinite tree. The paper leaves
    open whether the unexpanded candidates fill the tree after an early stop (its listing returns expanded ones only,
    its guarantee reads as if they did): `fill`. It states a depth limit but uses none: `max_depth`.
    """

    nodes: int = option(60, "rows of the verify pass, the root counted", low=1)
    width: int = option(10, "nodes expanded in one draft pass", low=1)
    th: float = option(0.6, "stop when the nodes to expand sum to less path probability than this", low=0, high=1)
    fill: bool = option(True, "fill the tree with the best unexpanded nodes; False returns the listing's tree")
    max_depth: int | None = option(None, "longest drafted path; None: no limit", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gains: list[float] = []  # S_i of this cycle: what the nodes of each pass sum to, the refused one last
        self._taken = torch.zeros(0, dtype=torch.bool)  # [N] out of the queue: expanded, or refused

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        if len(tree) == 1:
            self.gains, self._taken = [], torch.zeros(0, dtype=torch.bool)
        last = self._last(tree.score)
        front = self._take(tree, min(self.max_depth or ctx.room, ctx.room - 1), last)
        front = front[tree.score[front] > self._last(tree.score[self._taken])]
        self.gains.append(float(tree.score[front].exp().sum()))
        if not len(front) or self.gains[-1] < self.th:
            return None
        return Grow(front, self._children(tree, float(tree.score[front].max()), last))

    def _last(self, scores: Tensor) -> float:
        """What a node must beat to be among the best of these, as many as fit the tree."""
        return float(scores.topk(self.nodes).values[-1]) if len(scores) >= self.nodes else -math.inf

    def _take(self, tree: DraftTree, limit: int, last: float) -> Tensor:
        """The best nodes of the queue; those at the depth limit leave it in their turn, but use no place."""
        taken = torch.cat([self._taken, torch.zeros(len(tree) - len(self._taken), dtype=torch.bool)])
        leaf = tree.depth >= limit
        front = best(tree, torch.nonzero(~(taken | leaf) & (tree.score >= last)).flatten(), self.width)
        lowest = float(tree.score[front].min()) if len(front) else -math.inf
        self._taken = (taken | (leaf & (tree.score >= lowest))).index_fill(0, front, True)
        return front

    def _children(self, tree: DraftTree, top: float, last: float) -> int:
        """How many children can matter of a node that scores `top` or less.

        Every node that scores as much comes before them, and the j-th likeliest child has probability 1/j at the most,
        which must beat the last of the best `nodes` known already.
        """
        ahead = int((tree.score >= top).sum())
        return max(min(self.nodes - ahead, int(1.0001 * math.exp(min(top - last, 20.0)))), 1)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        chosen = tree.score >= self._last(tree.score) if self.fill else self._taken
        return best(tree, torch.nonzero(chosen).flatten(), self.nodes)
