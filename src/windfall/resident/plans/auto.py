"""`auto` where rows are cheap."""

from __future__ import annotations

from collections.abc import Iterable

from windfall import flat
from windfall.calibration import CHILDREN, MOST_SETTLED
from windfall.context import Context
from windfall.policies.auto import Auto
from windfall.resident.parcel import Parcel
from windfall.resident.plans.base import Plan
from windfall.resident.seen import Seen


class AutoPlan(Plan):
    """The nodes most likely to be accepted come next, while they earn more than the pass costs; then as many rows as
    are worth theirs. The rule of `flat.py`, which `auto` follows where rows are cheap."""

    rule = "calibrated"
    watches = ("promise",)
    foresees = True
    policy: Auto

    def __init__(self, policy: Auto):
        super().__init__(policy, flat.PASSES, flat.WIDTH, CHILDREN, min(policy.nodes, flat.ROWS[-1]))
        self._worth, self._fee, self._first, self._before = 0, 0.0, 0.0, 0.0
        self._least, self._sizes = 1, flat.ROWS
        self._told: object = None  # what the device goes by

    def suits(self, ctx: Context) -> bool:
        return flat.suits(ctx)

    def brief(self, terms: Parcel, ctx: Context) -> None:
        self.policy.follow(ctx)
        calibrator, (fee, price) = ctx.calibrator, flat.prices(ctx)
        told = (calibrator, calibrator.version, fee, price)
        if told != self._told:
            host, means = terms.host, calibrator.means()  # the last copy is through: a pass behind it was waited for
            host["weights"][:], host["outlook"][:], host["prices"][:] = calibrator.weights, means, (fee, price)
            terms.send()
            self._told, self._fee, self._first = told, fee, flat.first(calibrator, price)
        self._before, self._least, self._sizes = self._first, calibrator.least, flat.sizes(ctx)

    def settled(self, ctx: Context) -> int | None:
        return None

    def least(self) -> int:
        return self._least

    def goes_on(self, level: int, seen: Seen, ctx: Context) -> bool:
        _, _, gain, worth = seen.promise
        self._worth, before = int(worth), self._before
        self._before = gain + self._fee
        return level + 1 < self.passes and flat.pays(self._before, before, self._fee)

    def verified(self, level: int) -> tuple[int, int]:
        return min(flat.rows(self._worth, level, self._sizes), self.rows), level

    def openings(self, settled: int | None) -> Iterable[int]:
        return range(1, MOST_SETTLED + 1)

    def sizes(self) -> Iterable[int]:
        return {min(size, self.rows) for size in flat.ROWS}
