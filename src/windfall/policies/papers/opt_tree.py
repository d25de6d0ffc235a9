"""Layers of the best nodes until another layer brings too little (OPT-Tree, Wang et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.tree import DraftTree, Floats
from windfall.core.types import Grow
from windfall.policies.base import TreePolicy, best_of
from windfall.policies.context import Context


@dataclass
class OptTree(TreePolicy):
    """The tree of `nodes` nodes with the highest sum of path probabilities, drafted layer by layer.

    Nodes that fell out of the best `nodes` are not expanded: nothing below them could come back in. The release
    measures the gain without the newest layer and throws that layer away in the end, which wastes a draft pass a
    cycle (and drafts the first two layers always); `literal` does the same.
    """

    nodes: int = option(60, "drafted nodes to verify", low=1)
    threshold: float = option(0.5, "go on while a layer adds more than this to the expected tokens", low=0)
    depth: int = option(10, "draft passes at the most", low=1)
    k: int | None = option(None, "children of a node; none: as many as nodes, which makes the tree exact", low=1)
    literal: bool = option(False, "as the release: the newest layer is drafted but not used")

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        score, depth = tree.arrays.score, tree.arrays.depth
        level = int(depth[-1])
        if level >= self.depth or self._gain(tree, level - self.literal) <= self.threshold:
            return None
        (frontier,) = ((score >= self._top(tree, level).min()) & (depth == level)).nonzero()
        if not len(frontier):
            return None
        return Grow(torch.from_numpy(best_of(tree, frontier, self.nodes)), k=self.k or self.nodes)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        depth = tree.arrays.depth
        level = max(int(depth[-1]) - self.literal, 0)
        return torch.from_numpy(best_of(tree, (depth <= level).nonzero()[0], self.nodes + 1))

    def _top(self, tree: DraftTree, level: int) -> Floats:
        """The best scores down to this level, the root's among them."""
        scores = tree.arrays.score[tree.arrays.depth <= level]
        return np.partition(scores, -self.nodes - 1)[-self.nodes - 1 :] if len(scores) > self.nodes else scores

    def _gain(self, tree: DraftTree, level: int) -> float:
        """What this level added to the expected tokens."""
        if level <= 0:
            return math.inf
        return float(np.exp(self._top(tree, level)).sum() - np.exp(self._top(tree, level - 1)).sum())
