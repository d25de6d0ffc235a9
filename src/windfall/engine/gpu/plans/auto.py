"""`auto` where rows are cheap."""

from __future__ import annotations

from collections.abc import Iterable

from windfall.costs.acceptance import FORECAST_CHILDREN, MAX_UNASKED_PASSES
from windfall.engine.gpu.plans.base import Plan
from windfall.engine.gpu.transfer import PackedBuffer
from windfall.engine.gpu.view import TreeView
from windfall.policies import cheap_rows
from windfall.policies.auto import Auto
from windfall.policies.context import Context


class AutoPlan(Plan):
    """The nodes most likely to be accepted come next, while they earn more than the pass costs; then as many rows as
    are worth theirs. The rule of `flat.py`, which `auto` follows where rows are cheap."""

    rule = "calibrated"
    watches = ("promise",)
    foresees = True
    policy: Auto

    def __init__(self, policy: Auto):
        super().__init__(
            policy, cheap_rows.PASSES, cheap_rows.WIDTH, FORECAST_CHILDREN, min(policy.nodes, cheap_rows.ROWS[-1])
        )
        self._worth, self._fee, self._first, self._before = 0, 0.0, 0.0, 0.0
        self._least, self._sizes = 1, cheap_rows.ROWS
        self._told: object = None  # what the device goes by

    def suits(self, ctx: Context) -> bool:
        return cheap_rows.suits(ctx)

    def brief(self, terms: PackedBuffer, ctx: Context) -> None:
        self.policy.follow(ctx)
        calibrator, (fee, price) = ctx.calibrator, cheap_rows.prices(ctx)
        told = (calibrator, calibrator.version, fee, price)
        if told != self._told:
            host, means = terms.host, calibrator.mean_forecasts()  # the last copy is done: a later pass was awaited
            host["weights"][:], host["forecast"][:], host["prices"][:] = calibrator.weights, means, (fee, price)
            terms.send()
            self._told, self._fee, self._first = told, fee, cheap_rows.first(calibrator, price)
        self._before, self._least, self._sizes = self._first, calibrator.min_draft_passes, cheap_rows.sizes(ctx)

    def settled(self, ctx: Context) -> int | None:
        return None

    def least(self) -> int:
        return self._least

    def goes_on(self, level: int, seen: TreeView, ctx: Context) -> bool:
        _, _, gain, worth = seen.promise
        self._worth, before = int(worth), self._before
        self._before = gain + self._fee
        return level + 1 < self.passes and cheap_rows.pays(self._before, before, self._fee)

    def verified(self, level: int) -> tuple[int, int]:
        return min(cheap_rows.rows(self._worth, level, self._sizes), self.rows), level

    def openings(self, settled: int | None) -> Iterable[int]:
        return range(1, MAX_UNASKED_PASSES + 1)

    def sizes(self) -> Iterable[int]:
        return {min(size, self.rows) for size in cheap_rows.ROWS}
