"""The best tree of a given size by best-first search (SpecExec, Svirschevski et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.tree import DraftTree, Floats, Integers
from windfall.core.types import Grow
from windfall.policies.base import TreePolicy, best_of
from windfall.policies.context import Context


@dataclass
class Optimal(TreePolicy):
    """Expand the best unexpanded nodes, at any depth, until none could bring a child among the best `nodes`.

    With `decay` 1, a `width` of at least `nodes` and enough `steps` these are exactly the most probable paths of all.
    The release lowers the score by log(0.95) a level; the paper does not mention it.
    """

    nodes: int = option(64, "drafted nodes to verify", low=1)
    beams: int = option(128, "nodes expanded in a draft pass at the most", low=1)
    width: int = option(32, "children of a node", low=1)
    steps: int = option(32, "draft passes at the most", low=1)
    decay: float = option(0.95, "factor on the path probability for each level; 1: none", low=0.01, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._passes = 0

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        self._passes = 0 if len(tree) == 1 else self._passes + 1
        if self._passes == self.steps:
            return None
        score = self._score(tree)
        alive = self._alive(tree, score)
        leaf = np.ones(len(tree), bool)
        leaf[tree.arrays.parents[1:]] = False
        useful = leaf[alive]
        if len(alive) > self.nodes:  # full: a child must beat the last place, so its parent must
            useful &= score[alive] > score[alive].min()
        frontier = alive[useful]
        if not len(frontier):
            return None
        front = best_of(tree, frontier, self.beams, score)
        return Grow(torch.from_numpy(front), min(self.width, self.nodes))

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        return torch.from_numpy(self._alive(tree, self._score(tree)))

    def _alive(self, tree: DraftTree, score: Floats) -> Integers:
        return best_of(tree, np.arange(len(tree)), self.nodes + 1, score)

    def _score(self, tree: DraftTree) -> Floats:
        lost: Floats = np.float32(math.log(self.decay)) * tree.arrays.depth.astype(np.float32)
        return tree.arrays.score + lost
