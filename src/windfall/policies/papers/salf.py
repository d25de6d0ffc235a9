"""Stopping at low further gains (SALF & TALF, Algorithm 2): a best-first tree, until going on promises too little."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.tree import DraftTree, Floats, Integers
from windfall.core.types import Grow
from windfall.policies.base import TreePolicy, best_of, last_of
from windfall.policies.context import Context


@dataclass
class Salf(TreePolicy):
    """Expand the `width` likeliest unexpanded nodes, of any depths, in one pass; stop when their summed path
    probability falls below `th`.

    At th=0, with k=none and a `cap` as large as `nodes`, this is the optimal tree search: the `nodes` likeliest nodes
    of the whole infinite tree. The paper leaves open whether unexpanded candidates fill the tree after an early stop
    (its listing returns expanded ones only, its guarantee reads as if they did): `fill`. It states a depth limit but
    uses none: `max_depth`. `k` and `cap` are ours: within them, the tree can grow on a GPU.
    """

    nodes: int = option(60, "rows of the verify pass, the root counted", low=1)
    width: int = option(10, "nodes expanded in one draft pass", low=1)
    th: float = option(0.6, "stop when the nodes to expand sum to less path probability than this", low=0, high=1)
    fill: bool = option(True, "fill the tree with the best unexpanded nodes; False returns the listing's tree")
    max_depth: int | None = option(None, "longest drafted path; None: no limit", low=1)
    k: int | None = option(10, "children of a node at the most; None: as many as can matter", low=1)
    cap: int = option(16, "draft passes at the most; the paper has no limit", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gains: list[float] = []  # S_i of this cycle: what the nodes of each pass sum to, the refused one last
        self._taken = np.zeros(0, bool)  # [N] out of the queue: expanded, or refused
        self._left: list[Floats] = []  # the same of a tree on a device: their scores, pass by pass

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        if len(tree) == 1:
            self.gains, self._taken = [], np.zeros(0, bool)
        if len(self.gains) == self.cap:
            return None
        score = tree.arrays.score
        last = self._last(score)
        front = self._take(tree, min(self.max_depth or ctx.room, ctx.room - 1), last)
        front = front[score[front] > self._last(score[self._taken])]
        self.gains.append(float(np.exp(score[front]).sum()))
        if not len(front) or self.gains[-1] < self.th:
            return None
        return Grow(torch.from_numpy(front), self._children(tree, float(score[front].max()), last))

    def _last(self, scores: Floats) -> float:
        """What a node must beat to be among the best of these, as many as fit the tree."""
        return float(last_of(scores, self.nodes)) if len(scores) >= self.nodes else -math.inf

    def _take(self, tree: DraftTree, limit: int, last: float) -> Integers:
        """The best nodes of the queue; those at the depth limit leave it in their turn, but use no place."""
        score, leaf = tree.arrays.score, tree.arrays.depth >= limit
        taken = np.zeros(len(tree), bool)
        taken[: len(self._taken)] = self._taken
        front = best_of(tree, (~(taken | leaf) & (score >= last)).nonzero()[0], self.width)
        lowest = float(score[front].min()) if len(front) else -math.inf
        taken |= leaf & (score >= lowest)
        taken[front] = True
        self._taken = taken
        return front

    def _children(self, tree: DraftTree, top: float, last: float) -> int:
        """How many children can matter of a node that scores `top` or less.

        Every node that scores as much comes before them, and the j-th likeliest child has probability 1/j at the most,
        which must beat the last of the best `nodes` known already.
        """
        ahead = int(np.count_nonzero(tree.arrays.score >= top))
        most = min(self.nodes - ahead, int(1.0001 * math.exp(min(top - last, 20.0))))
        return max(min(most, self.k or most), 1)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        score = tree.arrays.score
        chosen = score >= self._last(score) if self.fill else self._taken
        return torch.from_numpy(best_of(tree, chosen.nonzero()[0], self.nodes))

    def begin(self) -> None:
        """A cycle's tree grows on a device."""
        self._left = [np.zeros(1, np.float32)]

    def promising(self, score: Floats, front: Integers) -> bool:
        """Whether these nodes, the best of the queue, are worth a pass: `grow` for a tree of which `score` is all that
        is known. Those that cannot bring anything into the tree may be expanded too; they change nothing."""
        drafted = score[score > -math.inf]
        found = score[front]
        found = found[found >= self._last(drafted)]
        self._left.append(found)
        found = found[found > self._last(np.concatenate(self._left))]
        return len(found) > 0 and float(np.exp(found).sum()) >= self.th
