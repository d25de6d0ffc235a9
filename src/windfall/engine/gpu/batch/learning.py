"""What a round teaches about acceptance, for many requests at once, and when the host has the time to learn it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from windfall.costs.acceptance import Calibrator
from windfall.costs.correction import Correction
from windfall.policies.budget import Outcome

DELAY = 0.02  # share of the time that work may take while the host does not wait long enough for it
MOST_DELAY_SECONDS = 1e-3  # that it may take at once
NEW_SHARE = 0.25  # of the last wait, or piece, in the mean of recent ones


class SpareTime:
    """Work of the host that is done in small pieces, while it would wait for the device.

    A piece begins if it should end before the results of the round come: one that ends later delays the next launch.
    A host that is slower than the device never waits, but must learn, too: other pieces may delay rounds by a fiftieth.
    """

    def __init__(self) -> None:
        self._work: deque[tuple[str, Iterator[None]]] = deque()  # with names
        self._allowed = 0.0  # seconds by which rounds may be delayed
        self._began = time.perf_counter()  # the last `use`
        self._wait = 0.0  # seconds between `use` and the results, in recent rounds
        self._waited: float | None = None  # the same for this round, at least, if the results came during a piece
        self._pieces: dict[str, float] = {}  # mean seconds of recent pieces, by the name of the work

    def __len__(self) -> int:
        """The number of works that are queued."""
        return len(self._work)

    def add(self, name: str, work: Iterator[None]) -> None:
        """Queue this work. It yields after each piece; pieces of works of one name take about the same time."""
        self._work.append((name, work))

    def clear(self) -> None:
        """Drop all work."""
        self._work.clear()

    def use(self, waits: Callable[[], bool]) -> None:
        """Work while the host `waits` for results. Call this in every round, and then `results_came`."""
        now = time.perf_counter()
        self._allowed = min(self._allowed + DELAY * (now - self._began), MOST_DELAY_SECONDS)
        self._began, self._waited = now, None
        while self._work:
            (name, work), waiting = self._work[0], waits()
            fits = waiting and now - self._began + self._pieces.get(name, 0.0) <= self._wait
            if not (fits or self._allowed > 0):
                break
            try:
                next(work)
            except StopIteration:
                self._work.popleft()
            before, now = now, time.perf_counter()
            expected = self._pieces.get(name, 0.0)
            self._pieces[name] = expected + NEW_SHARE * (now - before - expected)
            self._allowed -= 0.0 if fits else now - before
            if waiting and not waits():
                self._waited = before - self._began

    def results_came(self) -> None:
        """The results of this round are there: remember how long that took."""
        waited = time.perf_counter() - self._began if self._waited is None else self._waited
        self._wait += NEW_SHARE * (waited - self._wait)


def learn(outcome: Outcome, calibrator: Calibrator, corrections: Mapping[int, Correction]) -> None:
    """Teach the calibrator and the corrections of these requests, by their numbers in the outcome.

    Only verified nodes whose parents were accepted count: of the others it is not known what they would have become.
    """
    above = (outcome.parents < 0) | outcome.accepted[outcome.parents]
    nodes = np.flatnonzero(outcome.verified & above & np.isin(outcome.owner, list(corrections)))
    if not len(nodes):
        return
    owner, accepted = outcome.owner[nodes], outcome.accepted[nodes].astype(np.float64)
    logq, depth, rank = outcome.logq[nodes], outcome.depth[nodes], outcome.rank[nodes]
    shifts = np.zeros(outcome.requests)
    for request, correction in corrections.items():
        shifts[request] = correction.shift
    chance = calibrator.probabilities(logq, depth, rank, shifts[owner])
    slopes = np.bincount(owner, accepted - chance, outcome.requests).tolist()
    information = np.bincount(owner, chance * (1 - chance), outcome.requests).tolist()
    drafted = np.bincount(owner, minlength=outcome.requests).tolist()
    for request, correction in corrections.items():
        correction.add(slopes[request], information[request], drafted[request] > 0, fit=True)
    parents = outcome.parents[nodes]
    families = np.where(parents >= 0, parents + outcome.requests, owner)  # siblings have the same
    _, families = np.unique(families, return_inverse=True)
    calibrator.learn(logq, depth, rank, accepted, families, len(corrections))
