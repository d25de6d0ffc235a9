"""Beam expansion and rerank (EAGLE-2, Li et al. 2024; EAGLE-3, Li et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.policies.base import TreePolicy, best, best_of
from windfall.policies.context import Context


@dataclass
class Beam(TreePolicy):
    """Expand the `k` best nodes of each level into `k` children each; verify the best `nodes` of all drafted."""

    depth: int = option(
        6, "draft passes, which is the longest drafted path (the release's depth argument plus 1)", low=1
    )
    k: int = option(10, "beam width, and children of a node", low=1)
    nodes: int = option(60, "rows of the verify pass, the root counted", low=1)

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        depth = tree.arrays.depth
        level = int(depth[-1])
        (frontier,) = (depth == level).nonzero()
        return Grow(torch.from_numpy(best_of(tree, frontier, self.k)), k=self.k) if level < self.depth else None

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        return best(tree, torch.arange(len(tree)), self.nodes)
