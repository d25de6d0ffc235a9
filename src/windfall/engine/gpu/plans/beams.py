"""Plain decoding, lines and beams: of fixed depth, or ended by what their levels sum to."""

from __future__ import annotations

from collections.abc import Iterable

from windfall.engine.gpu.plans.base import Plan
from windfall.engine.gpu.transfer import PackedBuffer
from windfall.engine.gpu.view import TreeView
from windfall.policies.base import TreePolicy
from windfall.policies.beam import Beam
from windfall.policies.chain import Chain
from windfall.policies.context import Context
from windfall.policies.papers.ddd import DDD
from windfall.policies.papers.gammatune import GammaTune
from windfall.policies.papers.gt import GT


class NonePlan(Plan):
    """Plain decoding."""

    def __init__(self, policy: TreePolicy):
        super().__init__(policy, 0, 1, 1, 1)


class ChainPlan(Plan):
    """A line of tokens, where its length is the same in all cycles."""

    def __init__(self, policy: Chain):
        super().__init__(policy, policy.depth, 1, 1, policy.depth + 1)

    @classmethod
    def stands_for(cls, policy: Chain) -> bool:
        return not policy.confidence and policy.schedule == "fixed"


class BeamPlan(Plan):
    """The best `k` of each level; the best rows of all."""

    policy: Beam

    def __init__(self, policy: Beam):
        super().__init__(policy, policy.depth, policy.k, policy.k, policy.nodes)


class DDDPlan(BeamPlan):
    """A beam that ends, at a few levels, when its nodes sum to too little."""

    policy: DDD
    watches = ("promise",)

    def settled(self, ctx: Context) -> int | None:
        return None

    def least(self) -> int:
        return max(min(self.policy.levels, default=self.passes), 1)

    def asks(self, level: int) -> bool:
        return level < self.passes and level in self.policy.levels

    def goes_on(self, level: int, seen: TreeView, ctx: Context) -> bool:
        return seen.promise[1] >= self.policy.threshold


class GammaTunePlan(BeamPlan):
    """A beam as deep as the last cycles suggest."""

    policy: GammaTune

    def settled(self, ctx: Context) -> int | None:
        return min(self.policy.gamma, self.passes)

    def openings(self, settled: int | None) -> Iterable[int]:
        least, most = self.policy.bounds
        return range(least, most + 1)


class GTPlan(Plan):
    """A beam that goes on while its best path is worth a draft step."""

    policy: GT
    watches = ("promise",)

    def __init__(self, policy: GT):
        super().__init__(policy, policy.cap, policy.k, policy.k, 1 + policy.nodes)
        self._counted = 0

    @classmethod
    def stands_for(cls, policy: GT) -> bool:
        return not policy.each

    def brief(self, terms: PackedBuffer, ctx: Context) -> None:
        self.policy.follow(ctx)

    def settled(self, ctx: Context) -> int | None:
        return None

    def goes_on(self, level: int, seen: TreeView, ctx: Context) -> bool:
        worth = seen.promise[0] > self.policy.least(ctx)
        self._counted = level if worth or self.policy.count_last else level - 1
        return level < self.passes and worth

    def verified(self, level: int) -> tuple[int, int]:
        return self._rows(self._counted), self._counted

    def _rows(self, levels: int) -> int:
        return 1 + min(levels * self.policy.k, self.policy.nodes)

    def sizes(self) -> Iterable[int]:
        return {self._rows(levels) for levels in range(self.passes + 1)}
