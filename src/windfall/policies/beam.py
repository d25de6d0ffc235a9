"""Beam expansion and rerank (EAGLE-2, Li et al. 2024; EAGLE-3, Li et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from windfall.core.options import option
from windfall.policies.base import TreePolicy
from windfall.policies.plan import Plan


@dataclass
class Beam(TreePolicy):
    """Expand the `k` best nodes of each level into `k` children each; verify the best `nodes` of all drafted."""

    depth: int = option(
        6, "draft passes, which is the longest drafted path (the release's depth argument plus 1)", low=1
    )
    k: int = option(10, "beam width, and children of a node", low=1)
    nodes: int = option(60, "rows of the verify pass, the root counted", low=1)

    def plan(self) -> Plan:
        return Plan(passes=self.depth, width=self.k, k=self.k, rows=self.nodes)
