"""A tree of fixed widths (SpecInfer, Miao et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch

from windfall.context import Context
from windfall.options import option
from windfall.policies.base import TreePolicy
from windfall.records import Grow, InputError
from windfall.tree import DraftTree

LARGEST = 1024  # nodes; more is a slip of the finger


@dataclass
class SpecInfer(TreePolicy):
    """Every node of a level gets the same number of children: the i-th width for nodes at depth i - 1.

    The default is the vector usually quoted for the paper. "4,1,1,1" is four independent lines, which is what
    SpecExec compares itself with under this name.
    """

    widths: str = option("1,1,3,1,1,1,1,1", "children of a node, level by level")

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = self.widths.split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise InputError(f"widths must be whole numbers from 1 with commas, like 1,1,3,1, not '{self.widths}'")
        self._widths = [int(part) for part in parts]
        if (total := sum(accumulate(self._widths, mul))) > LARGEST:
            raise InputError(f"widths must make at most {LARGEST} nodes, not {total}")

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        depth = tree.arrays.depth
        level = int(depth[-1])
        if level == len(self._widths):
            return None
        (frontier,) = (depth == level).nonzero()
        return Grow(torch.from_numpy(frontier), k=self._widths[level])
