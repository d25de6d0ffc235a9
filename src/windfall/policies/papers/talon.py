"""A tree that spends a budget layer by layer, wide where the drafter is unsure, deep where it is sure (TALON, 2026)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.core.options import option
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context
from windfall.policies.plan import SIZES, Decision, LayerGate, Plan, TreeView


@dataclass
class Talon(TreePolicy):
    """Layers of every node whose path probability is at least `mu` times the best one's, until `nodes` are spent.

    The first `init_layers` layers are the `k` likeliest nodes.

    The paper never stops for low confidence, so a sure drafter is followed one node a pass until the budget is full;
    the paper sets no limit to that: `cap` does.
    """

    nodes: int = option(60, "rows of the verify pass, the root counted", low=1)
    k: int = option(10, "nodes of a layer before `mu` is used", low=1)
    mu: float = option(0.03, "smallest path probability of a node, as a share of the best in its layer", low=0, high=1)
    init_layers: int = option(1, "layers before `mu` is used (the paper's ablation: 0 to 3)", low=0)
    children: int | None = option(16, "children of a node that are looked at; none: all, as in the paper", low=1)
    cap: int = option(24, "maximum draft passes; the paper has no limit", low=1)

    def plan(self) -> Plan:
        return Plan(
            passes=self.cap,
            width=self.nodes,
            k=min(self.children or self.nodes, self.nodes),
            rows=self.nodes,
            layer=LayerGate(self.mu, self.nodes, self.k, self.init_layers),
            watches=("summary",),
            decide=self.decide,
            asks=range(1, self.cap + 1),
            sizes=SIZES,
        )

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        summary = view.summary(level)
        return Decision(summary.best > -math.inf and summary.nodes < self.nodes, int(summary.nodes))
