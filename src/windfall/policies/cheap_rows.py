"""Where rows and draft passes are cheap, as on a GPU, the best tree per second has a simple form: a pass must be worth
its fee and a row its price. `auto` follows it there, and resident/plans/auto.py has the device follow it.

A decision that the device waits for leaves it idle. So it is made a pass ahead: while pass n+1 runs, what pass n
brought says whether pass n+2 will pay, and nobody waits.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from windfall.core.tree import DraftTree
from windfall.core.types import Step
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import Costs
from windfall.policies.context import Context

PASSES = 12  # draft passes at the most
WIDTH = 8  # nodes of a pass
ROWS: tuple[int, ...] = (1, 4, 8, 16, 24, 32, 48, 64, 96)  # sizes of verify passes
CHEAP = 0.3  # of a pass over one row: what a draft pass may cost
LARGE = 24  # rows, from which on a size says what rows cost: below it passes may be all but free
STEEP = 2.0  # a pass over the most rows may cost so many times one row's,
STEEPER = 4.0  # and so many where passes are graphs of fixed sizes: there, deciding about each row costs more than rows
DEARER = 2.0  # times what a row costs on the way to the best size: such rows behind it are left alone
TRIFLE = 0.001  # of a pass over one row: as much a row may always cost
SAME = 1.01  # times as much is no more
NEAR = 64  # tokens: texts whose lengths differ by less cost the same
EVERY = 4  # cycles between two lessons
FAMILIES = 16  # of children that a lesson is about, at the most


def is_flat(costs: Costs, length: int) -> bool:
    """Whether rows and draft passes are cheap here."""
    one = costs.verify(1, length)
    cheap = costs.draft(WIDTH) < CHEAP * one and costs.opening < 2 * CHEAP * one
    steep = STEEPER if costs.verifies[0][1].stepped else STEEP
    return cheap and costs.verify(ROWS[-1], length) < steep * one


def suits(ctx: Context) -> bool:
    """Whether to draft by this rule, which never leaves it at plain decoding: rows are cheap here, and a cycle with a
    single draft pass would lately have been faster than a plain one. How fast longer drafts are matters not."""
    if not is_flat(ctx.costs, ctx.length):
        return False
    opening = (ctx.costs.opening + ctx.costs.draft(WIDTH)) * _rate(ctx, 1.0)
    return first(ctx.calibrator, _prices(ctx, 1.0)[1]) > opening


def prices(ctx: Context) -> tuple[float, float]:
    """The fee of a draft pass and the price of a row, in tokens that the same time would earn elsewhere."""
    return _prices(ctx, ctx.calibrator.speedup)


def sizes(ctx: Context) -> tuple[int, ...]:
    """Rows of verify passes, up to the most: those sizes that cost clearly less than the next."""
    return _sizes(ctx.costs, _near(ctx))


def _prices(ctx: Context, gain: float) -> tuple[float, float]:
    return _prices_at(ctx.costs, _near(ctx), gain)


@lru_cache(maxsize=256)
def _prices_at(costs: Costs, length: int, gain: float) -> tuple[float, float]:
    rate = gain / (costs.verify(1, length) + costs.overhead)
    return costs.draft(WIDTH) * rate, _slope(costs, length)[0] * rate


@lru_cache(maxsize=256)
def _slope(costs: Costs, length: int) -> tuple[float, int]:
    """Seconds of a row, on the way to the size at which rows are cheapest; and the largest size behind that to which
    they are not much dearer: costs are stairs, some of them high."""
    one = costs.verify(1, length)
    extra = {size: max(costs.verify(size, length) - one, 0.0) for size in ROWS if size >= LARGE}
    best = min(extra, key=lambda size: (extra[size] / (size - 1), -size))
    price = extra[best] / (best - 1)
    limit = DEARER * max(price, TRIFLE * one)
    return price, max(size for size in extra if size >= best and extra[size] - extra[best] <= limit * (size - best))


@lru_cache(maxsize=256)
def _sizes(costs: Costs, length: int) -> tuple[int, ...]:
    kept = [_slope(costs, length)[1]]
    for size in [size for size in reversed(ROWS) if size < kept[0]]:
        if costs.verify(size, length) * SAME < costs.verify(kept[0], length):
            kept.insert(0, size)
    return tuple(kept)


def _rate(ctx: Context, gain: float) -> float:
    """Tokens a second, at so many times the pace of plain decoding."""
    return gain / (ctx.costs.verify(1, _near(ctx)) + ctx.costs.overhead)


def _near(ctx: Context) -> int:
    """About the text's length: prices change seldom, and with them what the device must be told."""
    return ctx.length // NEAR * NEAR


def rows(worth: int, passes: int, sizes: tuple[int, ...]) -> int:
    """Rows of the verify pass, where so many nodes were worth one before the last of the draft passes, which brings
    about as many as each of the others: the next of these sizes, which costs the same."""
    if not worth:
        return 1
    return next((size for size in sizes if size > worth * passes / max(passes - 1, 1)), sizes[-1])


def pays(now: float, before: float, fee: float) -> bool:
    """Whether the pass after the next is worth its fee, where the next is expected to earn `now` and the last was
    expected to earn `before`: what passes earn shrinks about evenly."""
    return now * min(now / max(before, 1e-9), 1.0) > fee


def earned(calibrator: Calibrator, depth: int, chance: float, reach: float, price: float) -> float:
    """By expanding a node, if its children are what children usually are."""
    return sum(max(reach * mean - price, 0.0) for mean in calibrator.forecast(depth, chance).mean)


def first(calibrator: Calibrator, price: float) -> float:
    """What a cycle's first pass is expected to earn."""
    return earned(calibrator, 0, 1.0, 1.0, price)


class Lessons:
    """What cycles teach, taken in every few of them and at the end: only then is the device told anew."""

    def __init__(self) -> None:
        self._cycles = self._tokens = 0
        self._seconds = 0.0

    def learn(self, step: Step, ctx: Context) -> None:
        """Learn from a cycle what drafting earns and what children to expect."""
        self._cycles += 1
        ctx.calibrator.record_draft_passes(step.draft_passes)
        if not step.recorded:  # else it says nothing about the pace
            self._tokens += len(step.tokens)
            self._seconds += step.seconds.total
        if (self._cycles + EVERY // 2) % EVERY and not step.finish:  # the calibrator's own turn is between
            return
        calibrator, costs = ctx.calibrator, ctx.costs
        if self._seconds > 0:
            calibrator.update_speedup(self._tokens, self._seconds, costs.verify(1, ctx.length) + costs.overhead)
        self._tokens, self._seconds = 0, 0.0
        if len(step.drafted) > 1:
            update_forecasts(step.drafted, calibrator, self._cycles // EVERY)


def update_forecasts(tree: DraftTree, calibrator: Calibrator, turn: int) -> None:
    """Teach the calibrator what children some of this tree's nodes turned out to have; others in the next turn."""
    chances, parents = calibrator.chances(tree), tree.arrays.parents[1:]
    sums = np.bincount(parents, chances, len(tree))
    shares = chances / np.maximum(sums[parents], 1.0)
    order = np.argsort(parents, kind="stable")
    ends = np.flatnonzero(np.diff(parents[order], append=-1)) + 1  # of each family
    starts, depth = np.concatenate(([0], ends[:-1])), tree.arrays.depth
    stride = -(-len(ends) // FAMILIES)
    for family in range(turn % stride, len(ends), stride):
        own = order[starts[family] : ends[family]]
        parent = int(parents[own[0]])
        chance = 1.0 if parent == 0 else float(shares[parent - 1])  # as the rule looks it up
        calibrator.update_forecast(int(depth[parent]), chance, shares[own].tolist())
