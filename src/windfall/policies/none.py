"""Plain decoding through the same engine: one row a pass. The baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

from windfall.policies.base import TreePolicy
from windfall.policies.plan import Plan


@dataclass
class NoSpeculation(TreePolicy):
    """Plain decoding: never drafts."""

    def plan(self) -> Plan:
        return Plan(passes=0, width=1, k=1, rows=1)
