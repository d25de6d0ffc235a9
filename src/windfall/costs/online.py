"""Correct measured costs with the times of passes during decoding.

A profile that was measured while the machine was busy is corrected within a few cycles.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from windfall.costs.curves import Costs, Curve, monotone, quickest_quarter

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)  # rows or nodes; 0 is the first draft pass of a cycle
ONE = SIZES.index(1)
RECENT_PASSES = 24  # passes of any size that count
RECENT_PASSES_PER_SIZE = 12
MIN_PASSES = 3  # at least one of this many passes is undisturbed
DISTINCT_FACTOR = 1.5  # a smaller difference between sizes, or between draft and verify passes, is taken for noise
DISTINCT_FACTOR_GRAPHS = 1.1  # the same where passes are CUDA graphs: a device times them, and little disturbs them
CHANGE_FACTOR = 1.1  # a smaller change does not update the costs
RECOVERY_FACTOR = 1.5  # a verify pass this much faster than before means that other work on the machine has ended
MIN_SLOPE = 0.0005  # of the smallest pass's time, per added row or node: a larger pass is never free
LENGTH_STEP = 64  # tokens; shorter differences in context length are ignored
DISTURBED_FACTOR = 2.0  # a pass slower than this times its expected time is not a measurement of its size
WARM_UP_CYCLES = 3  # of slower passes, which only count where they are faster than expected
INITIAL_PROBE_STEPS = 4.0  # plain steps' time that may be spent on probes at the start
PROBE_SHARE = 0.01  # of the decoding time that may be spent on probes later
MAX_CACHED_SIZES = 4096  # pairs of rows and length whose measured seconds are cached
STALE_CYCLES = 512  # a size without a pass in this many cycles is worth a probe


class OnlineCosts:
    """The measured costs, times a correction factor for each size of pass that has run.

    Disturbances only make a pass slower. So the fastest quarter of the recent passes of a size counts, as in the
    measurement: a faster pass is believed at once, slower ones only when they persist. Sizes without passes share the
    factors of their neighbours. Draft passes have the factor of a plain step until the first one has run.
    """

    def __init__(self, measured: Costs, learns: bool = True):
        self.measured = self.costs = measured
        self.learns = learns  # False: the costs stay as given
        self._expected: dict[tuple[int, int], float] = {}  # seconds of a verify pass, by rows and length step
        self._cycles = 0
        self._reset(1.0)
        self._budget = INITIAL_PROBE_STEPS * measured.verify(1, 0)

    def _reset(self, level: float) -> None:
        """Forget all factors but this common one."""
        distinct = DISTINCT_FACTOR_GRAPHS if self.measured.verifies[0][1].stepped else DISTINCT_FACTOR
        self._drafts, self._verifies = Factors(level, distinct), Factors(level, distinct)
        self._last_seen = [-STALE_CYCLES] * len(SIZES)  # the last cycle with a verify pass of each size

    def record_verify(self, rows: int, length: int, seconds: float, at_most: bool = False) -> None:
        """Learn from a verify pass, the end of each cycle. `at_most`: it had more to do than such a pass usually has.

        When passes suddenly become much faster, what was learned on the busy machine is discarded.
        """
        self._cycles += 1
        self._budget += PROBE_SHARE * seconds
        key, place = (rows, length // LENGTH_STEP), _place(rows)
        if key not in self._expected:
            if len(self._expected) >= MAX_CACHED_SIZES:
                self._expected.clear()
            self._expected[key] = self.measured.verify(rows, length // LENGTH_STEP * LENGTH_STEP)
        believed = self._expected[key] * self._verifies.current[place]
        if seconds < DISTURBED_FACTOR * believed:
            self._last_seen[place] = self._cycles
        before = self._verifies.recent(place) if seconds * RECOVERY_FACTOR < believed else 0.0
        self._learn(self._verifies, place, seconds, self._expected[key], at_most)
        if before and self._verifies.recent(place) < before / RECOVERY_FACTOR:
            self._reset(self._verifies.recent(place))
            self._correct()

    def record_drafts(self, widths: Sequence[int], seconds: float, at_most: bool = False) -> None:
        """Learn from draft passes of these numbers of nodes; a width of 0 stands for the first pass of a cycle."""
        drafts, opening = self.measured.drafts, self.measured.opening
        expected = sum(drafts.at(width) if width else drafts.at(1) + opening for width in widths)
        self._learn(self._drafts, _place(widths[-1]), seconds, expected, at_most)

    def _learn(self, factors: Factors, place: int, seconds: float, expected: float, at_most: bool) -> None:
        if not self.learns or seconds <= 0 or expected <= 0:
            return
        at_most = at_most or self._cycles <= WARM_UP_CYCLES
        if factors.learn(place, seconds / expected, at_most):
            self._correct()

    def _correct(self) -> None:
        """Compute `costs` from the measured ones and the factors."""
        known, level = self.measured, self._verifies.update()
        self._drafts.update(level)
        drafts = self._drafts.applied(known.drafts)
        first = (known.drafts.at(1) + known.opening) * self._drafts.current[0]
        self.costs = replace(
            known,
            drafts=drafts,
            verifies=tuple((length, self._verifies.applied(curve)) for length, curve in known.verifies),
            overhead=known.overhead * level,
            opening=max(first - drafts.at(1), 0.0),
        )

    @property
    def knows_draft_costs(self) -> bool:
        """Whether enough draft passes have run to know their cost."""
        return self._drafts.count >= MIN_PASSES

    def next_stale_size(self, rows: int) -> int | None:
        """The next larger size of verify pass that no recent cycle had."""
        if self._cycles <= WARM_UP_CYCLES:
            return None
        later = range(_place(rows) + 1, len(SIZES))
        return next((SIZES[place] for place in later if self._cycles - self._last_seen[place] >= STALE_CYCLES), None)

    def try_spend(self, seconds: float) -> bool:
        """Take this time for a probe from the budget; False if the budget does not have it."""
        if not self.learns or seconds > self._budget:
            return False
        self._budget -= seconds
        return True

    @property
    def overestimate(self) -> float:
        """The largest factor by which the measurement overestimated a verify pass; at least 1."""
        return 1 / min(self._verifies.lowest(), 1.0)


class Factors:
    """Time over measured time of passes of one kind, by size."""

    def __init__(self, level: float, distinct: float) -> None:
        """`distinct`: sizes whose factors differ by less have the same one."""
        self._distinct = distinct
        self.current = [level] * len(SIZES)  # the factors that `applied` uses
        self.count = 0
        self._all = deque([level], RECENT_PASSES)
        self._own: dict[int, deque[float]] = {}  # by place in SIZES
        self._others: float | None = None  # the factor of the other kind of passes

    def learn(self, place: int, ratio: float, at_most: bool) -> bool:
        """Add a pass; True if the factors should be updated."""
        if at_most and ratio >= self.current[place]:
            return False
        self.count += 1
        if place not in self._own:
            self._own[place] = deque(maxlen=RECENT_PASSES_PER_SIZE)
        for taken in (self._all, self._own[place]):
            taken.append(ratio)
        current = self.current[place]
        if current / CHANGE_FACTOR < ratio < current * CHANGE_FACTOR:  # the usual case
            return False
        return not current / CHANGE_FACTOR < self._believed(place, self._level()) < current * CHANGE_FACTOR

    def _level(self) -> float:
        """The factor of all sizes; that of the other kind of passes unless it clearly differs."""
        level = quickest_quarter(self._all)
        if self._others is None:
            return level
        distinct = self.count and not 1 / self._distinct < level / self._others < self._distinct
        return level if distinct else self._others

    def _believed(self, place: int, level: float) -> float:
        """The factor of a size that has run: the one of all sizes unless it clearly differs."""
        own = quickest_quarter([level, *self._own[place]])
        return level if 1 / self._distinct < own / level < self._distinct else own

    def recent(self, place: int) -> float:
        """The factor of the recent passes of a size; 0 if there were too few."""
        own = self._own.get(place, ())
        return quickest_quarter(own) if len(own) >= MIN_PASSES else 0.0

    def update(self, others: float | None = None) -> float:
        """Compute `current`; `others` is the factor of the other kind of passes. Returns the factor of a plain step."""
        self._others = others
        level = self._level()
        places = sorted(self._own) or [ONE]
        logs = [math.log(self._believed(place, level) if self._own else level) for place in places]
        self.current = np.exp(np.interp(range(len(SIZES)), places, logs)).tolist()
        return self.current[ONE]

    def lowest(self) -> float:
        """The lowest factor of the sizes that have run; that of all sizes if none has."""
        return min((quickest_quarter(taken) for taken in self._own.values()), default=min(self._all))

    def applied(self, curve: Curve) -> Curve:
        """The corrected curve; it still rises with size."""
        sizes = sorted({*curve.sizes, *(() if curve.stepped else (size for size in SIZES if size > curve.sizes[0]))})
        seconds = monotone([curve.at(size) * self.current[_place(size)] for size in sizes])
        for place, (small, large) in enumerate(pairwise(sizes), 1):
            seconds[place] = max(seconds[place], seconds[place - 1] + MIN_SLOPE * seconds[0] * (large - small))
        return replace(curve, sizes=tuple(sizes), seconds=tuple(seconds))


def _place(size: int) -> int:
    """The index in SIZES of the next size up."""
    return min(bisect_left(SIZES, size), len(SIZES) - 1)
