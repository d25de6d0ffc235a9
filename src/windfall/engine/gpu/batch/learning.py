"""What a round teaches about acceptance, for many requests at once, and when the host has the time to learn it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from windfall.costs.acceptance import Calibrator
from windfall.costs.correction import Correction
from windfall.policies.budget import Outcome

DELAY = 0.02  # share of the time that work may take if the host never waits
MOST_DELAY_SECONDS = 1e-3  # that it may take at once


class SpareTime:
    """Work of the host that is done in small pieces, while it would wait for the device.

    By then the next round is launched, so that the device does not wait for the end of a piece. If the host never has
    to wait, because it is slower than the device, pieces delay rounds by about a fiftieth.
    """

    def __init__(self) -> None:
        self._work: deque[Iterator[None]] = deque()
        self._allowed = 0.0  # seconds by which rounds may be delayed
        self._last = time.perf_counter()

    def __len__(self) -> int:
        """The number of works that are queued."""
        return len(self._work)

    def add(self, work: Iterator[None]) -> None:
        """Queue this work. It yields after each piece."""
        self._work.append(work)

    def clear(self) -> None:
        """Drop all work."""
        self._work.clear()

    def use(self, waits: Callable[[], bool]) -> None:
        """Work as long as the host `waits`. Call this in every round."""
        now = time.perf_counter()
        self._allowed = min(self._allowed + DELAY * (now - self._last), MOST_DELAY_SECONDS)
        self._last = now
        while self._work and ((free := waits()) or self._allowed > 0):
            try:
                next(self._work[0])
            except StopIteration:
                self._work.popleft()
            began, now = now, time.perf_counter()
            self._allowed -= 0.0 if free else now - began


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
