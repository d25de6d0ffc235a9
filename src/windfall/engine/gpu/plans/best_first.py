"""SALF: the best of all unexpanded nodes, pass by pass."""

from __future__ import annotations

from windfall.engine.gpu.plans.base import Plan
from windfall.engine.gpu.view import TreeView
from windfall.policies.context import Context
from windfall.policies.papers.salf import Salf


class SalfPlan(Plan):
    """The likeliest nodes of all that are not yet expanded come next, until they promise too little."""

    rule = "best"
    watches = ("score", "expanded")
    policy: Salf

    def __init__(self, policy: Salf):
        super().__init__(policy, policy.cap, policy.width, policy.k or 0, policy.nodes)

    @classmethod
    def stands_for(cls, policy: Salf) -> bool:
        return policy.k is not None and policy.fill and policy.max_depth is None

    def settled(self, ctx: Context) -> int | None:
        return None

    def asks(self, level: int) -> bool:
        return level < self.passes

    def goes_on(self, level: int, seen: TreeView, ctx: Context) -> bool:
        if level == 1:
            self.policy.begin()
        front = seen.expanded(level + 1)
        return self.policy.promising(seen.all_scores(level, root=True), front[front >= 0])
