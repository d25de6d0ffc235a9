"""The rule of `auto` where rows and draft passes are cheap, as on a GPU: a draft pass runs if it should earn more
tokens than its time is worth, and a node is verified if its chance of acceptance exceeds the price of a row.

The device would be idle while it waits for a decision. So decisions are made one pass ahead: while pass n + 1 runs, the
result of pass n decides whether pass n + 2 runs.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from windfall.core.tree import DraftTree
from windfall.core.types import Step
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import Costs
from windfall.policies.context import Context

MAX_PASSES = 12  # draft passes of a cycle
WIDTH = 8  # nodes of a draft pass
ROWS: tuple[int, ...] = (1, 4, 8, 16, 24, 32, 48, 64, 96)  # sizes of verify passes
MAX_DRAFT_COST = 0.3  # of a draft pass, as a share of a verify pass over one row
MIN_PRICED_ROWS = 24  # smaller verify passes may cost the same as one row, and do not show what a row costs
MAX_ROWS_COST = 2.0  # of the largest verify pass, as a multiple of one over one row
MAX_STEPPED_ROWS_COST = 4.0  # the same where passes are CUDA graphs of fixed sizes: deciding about each row costs more
MAX_PRICE_RATIO = 2.0  # rows beyond the size with the cheapest rows may cost this multiple of the cheapest
NEGLIGIBLE = 0.001  # price of a row, as a share of a verify pass over one row, that is never too high
SAME_COST = 1.01  # sizes whose costs differ by less than this factor cost the same
LENGTH_STEP = 64  # tokens; texts whose lengths differ by less have the same prices
UPDATE_EVERY_CYCLES = 4
MAX_FAMILIES = 16  # groups of siblings that one update learns from


def rows_are_cheap(costs: Costs, length: int) -> bool:
    """Whether rows and draft passes are cheap here."""
    one = costs.verify(1, length)
    cheap = costs.draft(WIDTH) < MAX_DRAFT_COST * one and costs.opening < 2 * MAX_DRAFT_COST * one
    steep = MAX_STEPPED_ROWS_COST if costs.verifies[0][1].stepped else MAX_ROWS_COST
    return cheap and costs.verify(ROWS[-1], length) < steep * one


def suits(ctx: Context) -> bool:
    """Whether to draft by this rule: rows are cheap here, and a cycle with one draft pass should be faster than plain
    decoding. This rule always drafts, so it must not be used where plain decoding is faster."""
    if not rows_are_cheap(ctx.costs, ctx.length):
        return False
    opening = (ctx.costs.opening + ctx.costs.draft(WIDTH)) * _rate(ctx, 1.0)
    return first(ctx.calibrator, _prices(ctx, 1.0)[1]) > opening


def prices(ctx: Context) -> tuple[float, float]:
    """The price of a draft pass and of a row, in tokens that could be generated in the same time."""
    return _prices(ctx, ctx.calibrator.speedup)


def sizes(ctx: Context) -> tuple[int, ...]:
    """The sizes of verify passes to use: those that cost clearly less than the next larger one."""
    return _sizes(ctx.costs, _rounded_length(ctx))


def _prices(ctx: Context, speedup: float) -> tuple[float, float]:
    return _prices_at(ctx.costs, _rounded_length(ctx), speedup)


@lru_cache(maxsize=256)
def _prices_at(costs: Costs, length: int, speedup: float) -> tuple[float, float]:
    rate = speedup / (costs.verify(1, length) + costs.overhead)
    return costs.draft(WIDTH) * rate, _slope(costs, length)[0] * rate


@lru_cache(maxsize=256)
def _slope(costs: Costs, length: int) -> tuple[float, int]:
    """The seconds of a row at the size where rows are cheapest, and the largest size at which they cost little more.

    Costs rise in steps, some of them high.
    """
    one = costs.verify(1, length)
    extra = {size: max(costs.verify(size, length) - one, 0.0) for size in ROWS if size >= MIN_PRICED_ROWS}
    best = min(extra, key=lambda size: (extra[size] / (size - 1), -size))
    price = extra[best] / (best - 1)
    limit = MAX_PRICE_RATIO * max(price, NEGLIGIBLE * one)
    return price, max(size for size in extra if size >= best and extra[size] - extra[best] <= limit * (size - best))


@lru_cache(maxsize=256)
def _sizes(costs: Costs, length: int) -> tuple[int, ...]:
    kept = [_slope(costs, length)[1]]
    for size in [size for size in reversed(ROWS) if size < kept[0]]:
        if costs.verify(size, length) * SAME_COST < costs.verify(kept[0], length):
            kept.insert(0, size)
    return tuple(kept)


def _rate(ctx: Context, speedup: float) -> float:
    """Tokens per second at this speed-up over plain decoding."""
    return speedup / (ctx.costs.verify(1, _rounded_length(ctx)) + ctx.costs.overhead)


def _rounded_length(ctx: Context) -> int:
    """The text's length, rounded: prices then change rarely, and each change must be copied to the device."""
    return ctx.length // LENGTH_STEP * LENGTH_STEP


def rows(worth: int, passes: int, sizes: tuple[int, ...]) -> int:
    """The number of rows to verify, rounded up to one of `sizes`.

    `worth` nodes were worth a row before the last of `passes` draft passes. The last pass should add as many such nodes
    as each of the others.
    """
    if not worth:
        return 1
    return next((size for size in sizes if size > worth * passes / max(passes - 1, 1)), sizes[-1])


def pays(now: float, before: float, fee: float) -> bool:
    """Whether the pass after the next is worth its fee.

    The next pass should earn `now`, and the last one was expected to earn `before`. The speedup of successive passes is
    assumed to shrink by the same factor.
    """
    return now * min(now / max(before, 1e-9), 1.0) > fee


def earned(calibrator: Calibrator, depth: int, chance: float, reach: float, price: float) -> float:
    """Tokens expected from expanding a node, less the price of the rows, by the forecast for its children."""
    return sum(max(reach * mean - price, 0.0) for mean in calibrator.forecast(depth, chance).mean)


def first(calibrator: Calibrator, price: float) -> float:
    """Tokens expected from the first pass of a cycle, less the price of its rows."""
    return earned(calibrator, 0, 1.0, 1.0, price)


class CycleStats:
    """Updates the calibrator every few cycles, because each update must be copied to the device."""

    def __init__(self) -> None:
        self._cycles = self._tokens = 0
        self._seconds = 0.0

    def learn(self, step: Step, ctx: Context) -> None:
        """Learn the speed-up and the forecasts of children from a cycle."""
        self._cycles += 1
        ctx.calibrator.record_draft_passes(step.draft_passes)
        if not step.recorded:  # a cycle that captured a graph says nothing about the speed
            self._tokens += len(step.tokens)
            self._seconds += step.seconds.total
        if (
            self._cycles + UPDATE_EVERY_CYCLES // 2
        ) % UPDATE_EVERY_CYCLES and not step.finish:  # halfway between the calibrator's own fits
            return
        calibrator, costs = ctx.calibrator, ctx.costs
        if self._seconds > 0:
            calibrator.update_speedup(self._tokens, self._seconds, costs.verify(1, ctx.length) + costs.overhead)
        self._tokens, self._seconds = 0, 0.0
        if len(step.drafted) > 1:
            update_forecasts(step.drafted, calibrator, self._cycles // UPDATE_EVERY_CYCLES, ctx.shift)


def update_forecasts(tree: DraftTree, calibrator: Calibrator, turn: int, shift: float = 0.0) -> None:
    """Teach the calibrator which children some nodes of this tree had; the next turn takes other nodes."""
    chances, parents = calibrator.chances(tree, shift), tree.arrays.parents[1:]
    sums = np.bincount(parents, chances, len(tree))
    shares = chances / np.maximum(sums[parents], 1.0)
    order = np.argsort(parents, kind="stable")
    ends = np.flatnonzero(np.diff(parents[order], append=-1)) + 1  # of each family
    starts, depth = np.concatenate(([0], ends[:-1])), tree.arrays.depth
    stride = -(-len(ends) // MAX_FAMILIES)
    for family in range(turn % stride, len(ends), stride):
        own = order[starts[family] : ends[family]]
        parent = int(parents[own[0]])
        chance = 1.0 if parent == 0 else float(shares[parent - 1])  # the value by which a forecast is looked up
        calibrator.update_forecast(int(depth[parent]), chance, shares[own].tolist())
