"""Trees whose form is known before the text, or changes seldom: nobody is asked between their passes."""

from __future__ import annotations

from collections.abc import Iterable

from windfall.engine.gpu.plans.base import Plan
from windfall.engine.gpu.target import MOST
from windfall.engine.gpu.transfer import PackedBuffer
from windfall.policies.context import Context
from windfall.policies.static_trees import Shape, StaticTreePolicy

WIDEST = 16  # inner nodes of a level
APART = 2  # cycles between two forms: then the copy of the first is through


class ShapePlan(Plan):
    """The form of this cycle, level by level; all of it is verified."""

    rule = "shape"
    policy: StaticTreePolicy

    def __init__(self, policy: StaticTreePolicy):
        passes, k, rows = policy.most
        super().__init__(policy, passes, WIDEST, k, min(rows, MOST))
        self._shape: Shape | None = None  # of this cycle
        self._told: Shape | None = None  # that the device has
        self._cycles = APART  # since it was told

    def suits(self, ctx: Context) -> bool:
        return self._fits(self.policy.layout(ctx))

    def _fits(self, shape: Shape) -> bool:
        return 1 < len(shape) <= self.rows and max(map(len, shape.levels)) <= self.width

    def brief(self, terms: PackedBuffer, ctx: Context) -> None:
        shape = self.policy.layout(ctx)
        self._cycles += 1
        if self._cycles > APART and self._fits(shape):
            self._shape = shape
        if self._shape is not None and self._shape is not self._told:
            table = terms.host["shape"]
            table[:] = -1
            for (parent, rank), child in numbered(self._shape).items():
                table[parent, rank] = child
            terms.send()
            self._told, self._cycles = self._shape, 0

    def settled(self, ctx: Context) -> int | None:
        if self._shape is None:
            self._shape = self.policy.layout(ctx)
        return len(self._shape.levels)

    def verified(self, level: int) -> tuple[int, int]:
        assert self._shape is not None
        return len(self._shape), level

    def sizes(self) -> Iterable[int]:
        return () if self._shape is None else (len(self._shape),)


def numbered(shape: Shape) -> dict[tuple[int, int], int]:
    """(number of a node, rank) → that of its child. They ascend level by level, in each the inner nodes' first."""
    inner = {place for level in shape.levels for place in level}
    order = sorted(range(len(shape)), key=lambda place: (len(shape.paths[place]), place not in inner, place))
    number = {place: i for i, place in enumerate(order)}
    return {(number[parent], rank): number[child] for (parent, rank), child in shape.child.items()}
