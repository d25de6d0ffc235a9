"""What the rounds of a batch cost on a GPU: the costs of one text's passes, corrected by the times of rounds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from windfall.costs.curves import Costs, Curve, monotone, quickest_quarter

RECENT_ROUNDS = 8  # of one size that count
CHANGE_FACTOR = 1.03  # a smaller change does not update the costs
LENGTH_STEP = 64  # tokens; smaller differences in the mean length of texts are ignored
REQUESTS_STEP = 8  # a part of the seats; smaller differences in the number of requests are ignored
UPDATE_EVERY_ROUNDS = 8  # what was learned since then changes the costs
IDLE_MEMORY = 0.9  # share of what is known about idle times that is kept per round
IDLE_CHANGE_SECONDS = 2e-5  # a smaller change does not update the costs
WIDTHS = (1, 2, 4, 8, 16)  # nodes of a request in a draft pass, for which draft passes are known


class Situation(NamedTuple):
    """What the costs of a round depend on, besides its sizes."""

    seats: int  # requests of the graph that runs; some may be padding
    requests: int
    length: int  # of a text, the mean of all

    @property
    def step(self) -> int:
        """The length on the scale of LENGTH_STEP."""
        return self.length // LENGTH_STEP


class RoundCosts:
    """Costs of rounds in prepared sizes.

    The rows of all requests share the products of a pass, and each reads the keys of its own text. So a pass over these
    rows of one text of mean length is the first estimate. It is multiplied by a factor for each number of seats and
    rows, and for each number of seats and width of draft passes: the time of recent rounds over the estimate. Sizes
    that have not run have the factors of those around them. In addition, a device that is faster than the host is idle
    before a round, plain or with drafts, for a time that is learned, too.
    """

    def __init__(self, measured: Costs, rows: tuple[int, ...], learns: bool = True):
        """`rows`: the prepared sizes of verify passes."""
        self.measured, self.learns = measured, learns
        self._rows = rows
        self._verifies, self._drafts, self._idle = Factors(), Factors(), IdleTimes()
        self._known: dict[Situation, Costs] = {}
        self._recent: dict[int, Costs] = {}  # by seats
        self._changed, self._rounds = False, 0  # since the costs were made

    def at(self, now: Situation) -> Costs:
        """The costs in this situation, at any length of context; the same object until something has changed."""
        if self._changed and self._rounds >= UPDATE_EVERY_ROUNDS:
            self._known.clear()
            self._changed, self._rounds = False, 0
        coarse = max(now.seats // REQUESTS_STEP, 1)
        requests = min(-(-now.requests // coarse) * coarse, now.seats)
        place = Situation(now.seats, requests, now.step * LENGTH_STEP)
        if place not in self._known:
            self._known[place] = self._made(place)
        self._recent[now.seats] = self._known[place]
        return self._known[place]

    def recent(self, now: Situation) -> Costs:
        """The costs that were last asked for with this number of seats: they may be outdated, but are quick to get."""
        return self._recent.get(now.seats) or self.at(now)

    def _made(self, now: Situation) -> Costs:
        measured, length = self.measured, now.step * LENGTH_STEP
        sizes = (now.seats, *(size for size in self._rows if size > now.seats))
        verify = measured.verify_over(np.array(sizes), length) * self._verifies.at(now.seats, sizes)
        nodes = tuple(now.requests * width for width in WIDTHS)
        factors = self._drafts.at(now.seats, WIDTHS)
        draft = measured.drafts.over(np.array(nodes)) * factors
        plain, drafted = self._idle.at(now.seats)
        return Costs(
            drafts=Curve(nodes, tuple(monotone(draft.tolist()))),
            verifies=((0, Curve(sizes, tuple(monotone(verify.tolist())), stepped=True)),),
            overhead=measured.overhead + plain,
            opening=max(measured.opening * float(factors[0]) + drafted - plain, 0.0),
        )

    def record_idle(self, now: Situation, drafted: bool, seconds: float) -> None:
        """Learn that the device was idle before a round, because the host was late."""
        if self.learns and self._idle.learn(now.seats, drafted, seconds):
            self._changed = True

    def record_verify(self, now: Situation, rows: int, seconds: float) -> None:
        """Learn from a verify pass over this number of rows, padding included."""
        self._rounds += 1
        self._learn(self._verifies, now.seats, rows, seconds, self.measured.verify(rows, now.step * LENGTH_STEP))

    def record_drafts(self, now: Situation, passes: int, width: int, seconds: float) -> None:
        """Learn from all draft passes of a round."""
        drafts, opening = self.measured.drafts, self.measured.opening
        expected = opening + drafts.at(now.requests) + (passes - 1) * drafts.at(now.requests * width)
        self._learn(self._drafts, now.seats, width if passes > 1 else 1, seconds, expected)

    def _learn(self, factors: Factors, seats: int, size: int, seconds: float, expected: float) -> None:
        if self.learns and seconds > 0 and expected > 0 and factors.learn(seats, size, seconds / expected):
            self._changed = True


class Factors:
    """Time over estimated time, by seats and size."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = {}
        self._believed: dict[int, dict[int, float]] = {}  # by seats and size

    def learn(self, seats: int, size: int, factor: float) -> bool:
        """Add a round; True if that changes what is believed."""
        taken = self._recent.setdefault((seats, size), deque(maxlen=RECENT_ROUNDS))
        taken.append(factor)
        found, before = quickest_quarter(taken), self._believed.get(seats, {}).get(size)
        if before is not None and before / CHANGE_FACTOR < found < before * CHANGE_FACTOR:
            return False
        self._believed.setdefault(seats, {})[size] = found
        return True

    def at(self, seats: int, sizes: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The factors of these sizes, from the nearest number of seats that is known; 1 if none is."""
        if not self._believed:
            return np.ones(len(sizes))
        nearest: Mapping[int, float] = self._believed[min(self._believed, key=lambda each: abs(math.log(each / seats)))]
        known = sorted(nearest)
        logs = np.interp(np.log(sizes), np.log(known), np.log([nearest[size] for size in known]))
        return np.exp(logs)


class IdleTimes:
    """Mean seconds for which the device is idle before a round, by seats, for plain rounds and those with drafts."""

    def __init__(self) -> None:
        self._mean: dict[tuple[int, bool], float] = {}
        self._believed: dict[tuple[int, bool], float] = {}

    def learn(self, seats: int, drafted: bool, seconds: float) -> bool:
        """Add a round; True if that changes what is believed."""
        place = seats, drafted
        known = self._mean.get(place, seconds)
        seconds = min(seconds, 2 * known + IDLE_CHANGE_SECONDS)  # a single long pause counts little
        mean = self._mean[place] = IDLE_MEMORY * known + (1 - IDLE_MEMORY) * seconds
        before = self._believed.get(place)
        if before is not None and abs(mean - before) < IDLE_CHANGE_SECONDS:
            return False
        self._believed[place] = mean
        return True

    def at(self, seats: int) -> tuple[float, float]:
        """Before plain rounds, and before those with drafts; if one is not known, it is like the other."""
        known = self._believed
        plain, drafted = known.get((seats, False)), known.get((seats, True))
        if plain is None or drafted is None:
            plain = drafted = plain or drafted or 0.0
        return plain, drafted
