"""The tuned fixed tree that DynaTree compares itself with: one first token, then equal branching (DynaTree, 2026)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.tree import DraftTree, Flags, Floats
from windfall.core.types import Grow
from windfall.policies.base import NEVER, TreePolicy
from windfall.policies.context import Context


@dataclass
class FixedTree(TreePolicy):
    """One drafted token, then breadth-first: every node with probability at least `tau` gets `breadth` children.

    The paper's text prunes nodes below `tau`, its algorithm leaves them as leaves; this is the algorithm.
    """

    depth: int = option(8, "levels below the first drafted token", low=0)
    breadth: int = option(3, "children of a node", low=1)
    tau: float = option(0.1, "a node is expanded if its path probability is at least this", low=0, high=1)
    nodes: int = option(256, "drafted nodes at the most", low=1)

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        if len(tree) == 1:
            return Grow(torch.tensor([0]), k=1)
        depth = tree.arrays.depth
        level = int(depth[-1])
        if len(tree) > self.nodes:
            return None
        (frontier,) = ((depth == level) & self.goes_on(level, tree.arrays.score)).nonzero()
        return Grow(torch.from_numpy(frontier), k=self.breadth) if len(frontier) else None

    @property
    def least(self) -> float:
        """Less likely nodes are not expanded."""
        return max(self.tau, NEVER)

    def goes_on(self, level: int, score: Floats) -> Flags:
        """Which nodes of a level are expanded."""
        likely: Flags = score >= math.log(self.least)
        return likely & (level <= self.depth)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        return torch.arange(min(len(tree), self.nodes + 1))  # breadth-first order: cut where the algorithm would stop
