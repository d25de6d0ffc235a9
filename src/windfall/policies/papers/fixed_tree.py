"""The tuned fixed tree that DynaTree compares itself with: one first token, then equal branching (DynaTree, 2026)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.core.options import option
from windfall.policies.base import NEVER, TreePolicy
from windfall.policies.papers.bounded import bounded_plan
from windfall.policies.plan import Bounds, Plan


@dataclass
class FixedTree(TreePolicy):
    """One drafted token, then breadth-first: every node with probability at least `tau` gets `breadth` children.

    The paper's text prunes nodes below `tau`, its algorithm leaves them as leaves; this is the algorithm.
    """

    depth: int = option(8, "levels below the first drafted token", low=0)
    breadth: int = option(3, "children of a node", low=1)
    tau: float = option(0.1, "a node is expanded if its path probability is at least this", low=0, high=1)
    nodes: int = option(256, "maximum drafted nodes", low=1)

    def plan(self) -> Plan:
        return bounded_plan(self._bounds, self.depth + 1, 1, self.breadth, max(self.tau, NEVER), self.nodes)

    def _bounds(self) -> Bounds:
        breadth, least = self.breadth, math.log(max(self.tau, NEVER))
        return Bounds(least, math.inf, 0.0, 0.0, 0.0, breadth, breadth, breadth, 1)
