"""A single line of drafted tokens (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from windfall.options import option
from windfall.policies.base import TreePolicy
from windfall.records import Context, Grow
from windfall.tree import DraftTree


@dataclass
class Chain(TreePolicy):
    """The drafter's likeliest token, its likeliest successor, and so on."""

    depth: int = option(5, "tokens to draft", low=1)

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        tip = len(tree) - 1
        return Grow(torch.tensor([tip]), k=1) if int(tree.depth[tip]) < self.depth else None
