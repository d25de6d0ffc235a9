"""A tree of fixed widths (SpecInfer, Miao et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, product
from operator import mul

from windfall.core.options import option
from windfall.core.types import InputError
from windfall.policies.context import Context
from windfall.policies.shape import Shape
from windfall.policies.static_trees import StaticTreePolicy

MAX_NODES = 1024  # more is probably a typing error


@dataclass
class SpecInfer(StaticTreePolicy):
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
        widths = [int(part) for part in parts]
        if (total := sum(accumulate(widths, mul))) > MAX_NODES:
            raise InputError(f"widths must make at most {MAX_NODES} nodes, not {total}")
        levels = (product(*map(range, widths[: depth + 1])) for depth in range(len(widths)))
        self._layout = Shape(path for level in levels for path in level)

    def layout(self, ctx: Context) -> Shape:
        return self._layout

    @property
    def most(self) -> tuple[int, int, int]:
        return self._layout.extent
