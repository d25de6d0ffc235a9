"""Draft deeper while the best path is worth a draft step (the GT principle, dynamic)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from windfall.core.options import option
from windfall.core.types import Step
from windfall.costs.curves import ASSUMED
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Plan, TreeView


@dataclass
class GT(TreePolicy):
    """A beam that goes on while its best path probability is above c - eps; verifies the best min(levels * k, nodes).

    What to know about the rule: its gain, sum(alpha) - c * nodes, is called convex and is concave; its maximum is not
    the highest speed-up (1 + sum(alpha)) / (1 + c * passes), which lies at alpha > c * S with S the speed-up itself
    (a chain of acceptance 0.8 with c = 0.1: 10 tokens and 2.29x by the rule, 6 tokens and 2.47x at best); and c is paid
    once a pass, not once a node. `threshold="c*S"` is that correction, with S an average over the last cycles.

    The paper gives no largest size and no depth limit (`nodes`, `cap`), and does not say whether the level that fell
    below the threshold is verified too (`count_last`); its c is a ratio of parameter counts, ours of measured times.
    """

    uses_costs: ClassVar[bool] = True

    c: float | None = option(None, "cost of a draft pass, in plain steps; none: as measured on this machine", low=0)
    eps: float = option(0.0, "slack: how much less than c a level may bring", low=0)
    k: int = option(10, "beam width, and children of a node", low=1)
    nodes: int = option(60, "maximum drafted nodes to verify (open in the paper)", low=1)
    cap: int = option(24, "maximum draft passes (open in the paper)", low=1)
    threshold: str = option("c", "c as in the paper; c*S, its optimum: c times the speed-up", choices=("c", "c*S"))
    count_last: bool = option(False, "whether the level that fell below the threshold counts (open in the paper)")
    each: bool = option(False, "verify only nodes above the threshold themselves, up to `nodes`: the paper's Medusa+")
    eta: float = option(0.1, "weight of the last cycle in the average speed-up", low=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._speedup = 1.0
        self._ctx: Context | None = None

    def plan(self) -> Plan:
        whole = 1 + self.nodes
        sizes = (whole,) if self.each else {self._rows(levels) for levels in range(self.cap + 1)}
        return Plan(
            passes=self.cap,
            width=self.k,
            k=self.k,
            rows=whole,
            floor=self.least if self.each else None,
            watches=("summary",),
            decide=self.decide,
            asks=range(1, self.cap + 1),
            sizes=sizes,
        )

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        worth = view.summary(level).best > self.least(ctx)
        if self.each:
            return Decision(worth, 1 + self.nodes)
        counted = level if worth or self.count_last else level - 1
        return Decision(worth, self._rows(counted), counted)

    def _rows(self, levels: int) -> int:
        return 1 + min(levels * self.k, self.nodes)

    def start_cycle(self, ctx: Context) -> None:
        self._ctx = ctx

    def observe(self, step: Step) -> None:
        """Speed-up of this cycle: measured, or by the assumed costs while nothing was measured."""
        if self._ctx is None or step.recorded:
            return
        costs, length, seconds = self._ctx.costs, self._ctx.length, step.seconds.total
        if costs == ASSUMED or seconds <= 0:
            seconds = step.draft_passes * costs.draft(self.k) + costs.verify(len(step.tree), length) + costs.overhead
        speedup = len(step.tokens) * costs.verify(1, length) / seconds
        self._speedup += self.eta * (speedup - self._speedup)

    def least(self, ctx: Context) -> float:
        """The log-probability a path must exceed."""
        c = ctx.costs.draft(self.k) / ctx.costs.verify(1, ctx.length) if self.c is None else self.c
        least = (c * self._speedup if self.threshold == "c*S" else c) - self.eps
        return math.log(least) if least > 0 else -math.inf
