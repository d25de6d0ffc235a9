"""The plan of DynaTree and of the fixed tree in its paper: breadth-first growth within bounds."""

from __future__ import annotations

import math
from collections.abc import Callable

from windfall.policies.context import Context
from windfall.policies.plan import SIZES, Bounds, Decision, Plan, TreeView


def bounded_plan(bounds: Callable[[], Bounds], passes: int, first: int, k: int, least: float, nodes: int) -> Plan:
    """Expand every node that is within bounds; verify all nodes.

    Path probabilities of a level sum to at most 1, so at most 1 / `least` of its nodes can be that likely. `first` is
    the number of the root's children, `k` that of other nodes' children at the most.
    """
    widths: list[int] = []
    for _ in range(1, passes):
        drafted = k * widths[-1] if widths else first
        widths.append(min(drafted, int(1.0001 / least)))  # one more after rounding
    possible = 1 + first + k * sum(widths)

    def decide(level: int, view: TreeView, ctx: Context) -> Decision:
        summary = view.summary(level)
        return Decision(summary.best > -math.inf and summary.nodes <= nodes, min(int(summary.nodes), 1 + nodes))

    return Plan(
        passes=passes,
        width=max(widths, default=1),
        k=k,
        rows=min(possible, 1 + nodes),
        bounds=bounds,
        first_come=possible > 1 + nodes,
        watches=("summary",),
        decide=decide,
        asks=range(1, passes + 1),
        sizes=SIZES,
    )
