"""Measured costs, put right by what passes take in cycles: a profile made beside other work costs a few cycles."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from windfall.costs.curves import Costs, Curve, monotone, quickest_quarter

KNOTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)  # sizes told apart; 0 is a cycle's first draft pass
ONE = KNOTS.index(1)
LATELY, OWN = 24, 12  # passes of a kind that count, and those of a size
SOME = 3  # passes that are not all disturbed
APART = 1.5  # a factor, below which sizes, and both kinds of passes, are taken to be off alike: noise has spells
MOVED = 1.1  # a factor, from which on decisions are made anew
FREED = 1.5  # times quicker than passes of the size were before: the machine has got rid of other work
LEAST = 0.0005  # of a pass over one: a row or node more is never free
NEAR = 64  # tokens: texts whose lengths differ by less cost the same
DISTURBED = 2.0  # times what was believed: such a pass shows nothing yet
WARM = 3  # cycles after which times are what they will be
FREE = 4.0  # plain steps' time that may go into looks at once
SHARE = 0.01  # of the time that may go into them later
MANY = 4096  # sizes and lengths whose seconds are kept
STALE = 512  # cycles after which a size is worth a look again


class OnlineCosts:
    """What passes are believed to cost: as measured, times a factor for each size that cycles have shown.

    Whatever disturbs a pass only adds to its time. So of the last passes of a size the quickest quarter counts, as in
    measuring: one that was quicker than believed is believed at once, dearer ones when they keep coming. Sizes that no
    cycle had share the factors of their neighbours, and draft passes, before the first, that of a plain step.
    """

    def __init__(self, measured: Costs, learns: bool = True):
        self.measured = self.costs = measured
        self.learns = learns  # else the costs are taken as given
        self._expected: dict[tuple[int, int], float] = {}  # seconds of a verify pass, by rows and about the length
        self._cycles = 0
        self._begin(1.0)
        self._budget = FREE * measured.verify(1, 0)

    def _begin(self, level: float) -> None:
        """Know nothing but about how far off all passes are."""
        self._drafts, self._verifies = Factors(level), Factors(level)
        self._had = [-STALE] * len(KNOTS)  # the last cycle that verified about so many rows

    def verified(self, rows: int, length: int, seconds: float, at_most: bool = False) -> None:
        """Learn from a target pass, the end of each cycle. `at_most`: it had more to do than such passes usually.

        Where passes get much cheaper of a sudden, what was learnt beside other work is forgotten.
        """
        self._cycles += 1
        self._budget += SHARE * seconds
        key, place = (rows, length // NEAR), _place(rows)
        if key not in self._expected:
            if len(self._expected) >= MANY:
                self._expected.clear()
            self._expected[key] = self.measured.verify(rows, length // NEAR * NEAR)
        believed = self._expected[key] * self._verifies.now[place]
        if seconds < DISTURBED * believed:
            self._had[place] = self._cycles
        before = self._verifies.usual(place) if seconds * FREED < believed else 0.0
        self._learn(self._verifies, place, seconds, self._expected[key], at_most)
        if before and self._verifies.usual(place) < before / FREED:
            self._begin(self._verifies.usual(place))
            self._correct()

    def drafted(self, widths: Sequence[int], seconds: float, at_most: bool = False) -> None:
        """Learn from draft passes over so many nodes; a width of 0 stands for a cycle's first pass."""
        drafts, opening = self.measured.drafts, self.measured.opening
        expected = sum(drafts.at(width) if width else drafts.at(1) + opening for width in widths)
        self._learn(self._drafts, _place(widths[-1]), seconds, expected, at_most)

    def _learn(self, factors: Factors, place: int, seconds: float, expected: float, at_most: bool) -> None:
        if not self.learns or seconds <= 0 or expected <= 0:
            return
        at_most = at_most or self._cycles <= WARM
        if factors.learn(place, seconds / expected, at_most):
            self._correct()

    def _correct(self) -> None:
        """New costs, by all that is known."""
        known, level = self.measured, self._verifies.settle()
        self._drafts.settle(level)
        drafts = self._drafts.applied(known.drafts)
        first = (known.drafts.at(1) + known.opening) * self._drafts.now[0]
        self.costs = replace(
            known,
            drafts=drafts,
            verifies=tuple((length, self._verifies.applied(curve)) for length, curve in known.verifies),
            overhead=known.overhead * level,
            opening=max(first - drafts.at(1), 0.0),
        )

    @property
    def drafting_is_known(self) -> bool:
        """Whether cycles have shown what draft passes take."""
        return self._drafts.count >= SOME

    def unseen(self, rows: int) -> int | None:
        """The next larger verify pass that no cycle has lately had."""
        if self._cycles <= WARM:
            return None
        later = range(_place(rows) + 1, len(KNOTS))
        return next((KNOTS[place] for place in later if self._cycles - self._had[place] >= STALE), None)

    def affords(self, seconds: float) -> bool:
        """Spend so much time on a look at what may not be as dear as it seems, if there is as much."""
        if not self.learns or seconds > self._budget:
            return False
        self._budget -= seconds
        return True

    @property
    def too_dear(self) -> float:
        """How many times quicker verify passes were than measured, at the most: that was beside other work."""
        return 1 / min(self._verifies.least(), 1.0)


class Factors:
    """By size, what passes took over what was measured."""

    def __init__(self, level: float) -> None:
        self.now = [level] * len(KNOTS)  # what is gone by
        self.count = 0
        self._all = deque([level], LATELY)
        self._own: dict[int, deque[float]] = {}  # by place among KNOTS
        self._others: float | None = None  # what other passes are off by

    def learn(self, place: int, ratio: float, at_most: bool) -> bool:
        """Whether this changes noticeably what is to be believed."""
        if at_most and ratio >= self.now[place]:
            return False
        self.count += 1
        if place not in self._own:
            self._own[place] = deque(maxlen=OWN)
        for taken in (self._all, self._own[place]):
            taken.append(ratio)
        now = self.now[place]
        if now / MOVED < ratio < now * MOVED:  # nearly always
            return False
        return not now / MOVED < self._believed(place, self._level()) < now * MOVED

    def _level(self) -> float:
        """Of all sizes; that of other passes, unless it clearly differs."""
        level = quickest_quarter(self._all)
        if self._others is None:
            return level
        clearly = self.count and not 1 / APART < level / self._others < APART
        return level if clearly else self._others

    def _believed(self, place: int, level: float) -> float:
        """Of a size that was seen: the level of all, unless it clearly differs."""
        own = quickest_quarter([level, *self._own[place]])
        return level if 1 / APART < own / level < APART else own

    def usual(self, place: int) -> float:
        """Of the last passes of this size; 0 where there were too few."""
        own = self._own.get(place, ())
        return quickest_quarter(own) if len(own) >= SOME else 0.0

    def settle(self, others: float | None = None) -> float:
        """Go by what was learnt, beside what other passes are off by; returns the factor of a plain step."""
        self._others = others
        level = self._level()
        places = sorted(self._own) or [ONE]
        logs = [math.log(self._believed(place, level) if self._own else level) for place in places]
        self.now = np.exp(np.interp(range(len(KNOTS)), places, logs)).tolist()
        return self.now[ONE]

    def least(self) -> float:
        """The lowest factor of the sizes that were seen; that of all sizes where none was."""
        return min((quickest_quarter(taken) for taken in self._own.values()), default=min(self._all))

    def applied(self, curve: Curve) -> Curve:
        """The curve, corrected; it rises with size as before, be it by next to nothing."""
        sizes = sorted({*curve.sizes, *(() if curve.stepped else (knot for knot in KNOTS if knot > curve.sizes[0]))})
        seconds = monotone([curve.at(size) * self.now[_place(size)] for size in sizes])
        for place, (small, large) in enumerate(pairwise(sizes), 1):
            seconds[place] = max(seconds[place], seconds[place - 1] + LEAST * seconds[0] * (large - small))
        return replace(curve, sizes=tuple(sizes), seconds=tuple(seconds))


def _place(size: int) -> int:
    """Among KNOTS: the next size up."""
    return min(bisect_left(KNOTS, size), len(KNOTS) - 1)
