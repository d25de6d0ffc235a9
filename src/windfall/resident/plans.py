"""Policies in a form that the device can follow: sizes that are fixed, a rule for what comes next, and a few numbers
by which the host decides whether to go on. A test holds each to the policy it stands for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from windfall import flat
from windfall.calibration import CHILDREN
from windfall.context import Context
from windfall.kernels.top import MOST as MOST_CHILDREN
from windfall.policies.auto import Auto
from windfall.policies.base import TreePolicy
from windfall.policies.beam import Beam
from windfall.policies.ddd import DDD
from windfall.policies.gammatune import GammaTune
from windfall.policies.gt import GT
from windfall.policies.none import NoSpeculation
from windfall.resident.judge import MOST as MOST_ROWS
from windfall.resident.parcel import Parcel

MOST_PASSES, MOST_NODES = 32, 2048


class Plan:
    """`passes` at the most, each over `width` nodes with `k` children, and `rows` to verify at the most."""

    rule = "beam"  # or "calibrated": see kernels/grow.py

    def __init__(self, policy: TreePolicy, passes: int, width: int, k: int, rows: int):
        self.policy, self.passes, self.width, self.k, self.rows = policy, passes, width, k, rows

    @property
    def key(self) -> tuple[object, ...]:
        """What recorded work depends on."""
        return (self.rule, self.passes, self.width, self.k, self.rows)

    @property
    def nodes(self) -> int:
        """Of a cycle, the root counted."""
        return 1 + self.k * (1 + self.width * max(self.passes - 1, 0))

    def brief(self, terms: Parcel, ctx: Context) -> None:
        """Bring the device what the rule needs in this cycle."""

    def settled(self, ctx: Context) -> int | None:
        """How many passes this cycle takes, where that is known before it begins."""
        return self.passes

    def goes_on(self, level: int, promise: list[float], ctx: Context) -> bool:
        """Whether another pass follows, after `level` of them; `promise`: of its nodes, the highest key, the log of
        their summed exp(key), what they would earn; and how many nodes are worth a row."""
        return level < self.passes

    def least(self) -> int:
        """Passes before the host asks."""
        return 1

    def verified(self, level: int) -> tuple[int, int]:
        """Rows to verify after this many passes, and the deepest level of which nodes are taken."""
        return self.rows, self.passes


class NonePlan(Plan):
    """Plain decoding."""

    def __init__(self, policy: TreePolicy):
        super().__init__(policy, 0, 1, 1, 1)


class BeamPlan(Plan):
    """The best `k` of each level; the best rows of all."""

    policy: Beam

    def __init__(self, policy: Beam):
        super().__init__(policy, policy.depth, policy.k, policy.k, policy.nodes)


class DDDPlan(BeamPlan):
    """A beam that ends, at a few levels, when its nodes sum to too little."""

    policy: DDD

    def settled(self, ctx: Context) -> int | None:
        return None

    def least(self) -> int:
        return max(min(self.policy.levels, default=self.passes), 1)

    def goes_on(self, level: int, promise: list[float], ctx: Context) -> bool:
        return level < self.passes and (level not in self.policy.levels or promise[1] >= self.policy.threshold)


class GammaTunePlan(BeamPlan):
    """A beam as deep as the last cycles suggest."""

    policy: GammaTune

    def settled(self, ctx: Context) -> int | None:
        return min(self.policy.gamma, self.passes)


class GTPlan(Plan):
    """A beam that goes on while its best path is worth a draft step."""

    policy: GT

    def __init__(self, policy: GT):
        super().__init__(policy, policy.cap, policy.k, policy.k, 1 + policy.nodes)
        self._counted = 0

    def settled(self, ctx: Context) -> int | None:
        return None

    def goes_on(self, level: int, promise: list[float], ctx: Context) -> bool:
        worth = promise[0] > self.policy.least(ctx)
        self._counted = level if worth or self.policy.count_last else level - 1
        return level < self.passes and worth

    def verified(self, level: int) -> tuple[int, int]:
        return 1 + min(self._counted * self.policy.k, self.policy.nodes), self._counted


class AutoPlan(Plan):
    """The nodes most likely to be accepted come next, while they earn more than the pass costs; then as many rows as
    are worth theirs. The rule of `flat.py`, which `auto` follows where rows are cheap."""

    rule = "calibrated"
    policy: Auto

    def __init__(self, policy: Auto):
        super().__init__(policy, flat.PASSES, flat.WIDTH, CHILDREN, min(policy.nodes, flat.ROWS[-1]))
        self._worth = 0

    def brief(self, terms: Parcel, ctx: Context) -> None:
        self.policy.follow(ctx)
        calibrator, host = ctx.calibrator, terms.host
        host["weights"].copy_(torch.from_numpy(calibrator.weights))
        host["outlook"].copy_(torch.tensor(calibrator.means()))
        host["prices"].copy_(torch.tensor(flat.prices(ctx)))
        terms.send()

    def settled(self, ctx: Context) -> int | None:
        return None

    def least(self) -> int:
        return flat.LEAST

    def goes_on(self, level: int, promise: list[float], ctx: Context) -> bool:
        self._worth = int(promise[3])
        return level < self.passes and promise[2] > 0

    def verified(self, level: int) -> tuple[int, int]:
        return flat.rows(self._worth, self.rows), self.passes


PLANS: dict[type[TreePolicy], Callable[..., Plan]] = {
    NoSpeculation: NonePlan,
    Beam: BeamPlan,
    DDD: DDDPlan,
    GammaTune: GammaTunePlan,
    GT: GTPlan,
    Auto: AutoPlan,
}


def plan_of(policy: TreePolicy) -> Plan | None:
    """The plan that stands for this policy, where there is one that fits fixed buffers."""
    made = PLANS.get(type(policy))
    if made is None or (isinstance(policy, GT) and policy.each):
        return None
    plan = made(policy)
    fits = plan.rows <= MOST_ROWS and plan.k <= MOST_CHILDREN and plan.passes <= MOST_PASSES
    return plan if fits and plan.nodes < MOST_NODES else None
