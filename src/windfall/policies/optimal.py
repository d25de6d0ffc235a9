"""The best tree of a given size by best-first search (SpecExec, Svirschevski et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.core.options import option
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Plan, TreeView


@dataclass
class Optimal(TreePolicy):
    """Expand the best unexpanded nodes, at any depth, until none could bring a child among the best `nodes`.

    With `decay` 1, a `width` of at least `nodes` and enough `steps` these are exactly the most probable paths of all.
    The release lowers the score by log(0.95) a level; the paper does not mention it.
    """

    nodes: int = option(64, "drafted nodes to verify", low=1)
    beams: int = option(128, "maximum nodes expanded in a draft pass", low=1)
    width: int = option(32, "children of a node", low=1)
    steps: int = option(32, "maximum draft passes", low=1)
    decay: float = option(0.95, "factor on the path probability for each level; 1: none", low=0.01, high=1)

    def plan(self) -> Plan:
        return Plan(
            passes=self.steps,
            width=min(self.beams, self.nodes),
            k=min(self.width, self.nodes),
            rows=1 + self.nodes,
            order="best",
            top=1 + self.nodes,
            decay=self.decay,
            watches=("summary",),
            decide=self.decide,
        )

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        return Decision(view.summary(level).best > -math.inf, 1 + self.nodes)
