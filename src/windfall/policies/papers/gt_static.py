"""A fixed tree of all nodes that are worth a draft step (the GT principle, static)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from windfall.core.options import option
from windfall.policies.context import Context
from windfall.policies.shape import Shape
from windfall.policies.static_trees import (
    EXAMPLE,
    StaticTreePolicy,
    Table,
    grow_by_product,
    parse_table,
    parse_vector,
)

grown = lru_cache(maxsize=64)(grow_by_product)


@dataclass
class GTStatic(StaticTreePolicy):
    """Every node whose product of acceptances along its path is above c - eps.

    The paper bounds neither size nor depth; where acceptances are high or c small, `nodes` and `cap` do.
    For heads that differ by depth it leaves the details open: `acceptance` may be a table with a row a depth.
    """

    uses_costs: ClassVar[bool] = True

    acceptance: str = option(
        EXAMPLE,
        "probability that the child of each rank is correct, or a row for each depth: [[0.6,0.2],[0.5]]; measure it",
    )
    c: float | None = option(None, "cost of a draft pass, in plain steps; none: as measured on this machine", low=0)
    eps: float = option(0.0, "slack: how much less than c a node may bring", low=0)
    nodes: int = option(256, "maximum drafted nodes (open in the paper)", low=1)
    cap: int = option(24, "deepest node (open in the paper)", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._table: Table
        if self.acceptance.startswith("["):
            self._table = parse_table(self.acceptance, "acceptance")[: self.cap]
        else:
            self._table = (parse_vector(self.acceptance, "acceptance"),) * self.cap

    def layout(self, ctx: Context) -> Shape:
        c = ctx.costs.ratio if self.c is None else self.c
        return grown(self._table, self.nodes, max(c - self.eps, 0.0))

    @property
    def most(self) -> tuple[int, int, int]:
        return len(self._table), max(map(len, self._table)), self.nodes + 1
