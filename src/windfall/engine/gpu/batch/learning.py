"""What a round teaches about acceptance, for many requests at once."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from windfall.costs.acceptance import Calibrator
from windfall.costs.correction import Correction
from windfall.policies.budget import Outcome

FEWEST, MOST = 0.01, 0.3  # share of rounds from which acceptance is learned
DELAY = 0.02  # of rounds by learning
MEMORY = 0.9  # share of what is known about times that is kept per round


class Lessons:
    """Chooses the rounds from which acceptance is learned, so that learning delays rounds by about a fiftieth.

    The host learns while it would wait for the device. If it takes longer, the device waits. Rounds are drawn, because
    the requests whose trees the host gets take turns.
    """

    def __init__(self) -> None:
        self._chance = random.Random(0)
        self._waiting, self._round, self._lesson = Mean(), Mean(), Mean()
        self._taught = False  # in the present round

    def add_round(self, waited: float, seconds: float) -> None:
        """The host has waited for the device for a part of the seconds of a round."""
        if not self._taught:
            self._waiting.add(waited)
            self._round.add(seconds)
        self._taught = False

    def add_lesson(self, seconds: float) -> None:
        """The host has learned for this number of seconds."""
        self._taught = True
        self._lesson.add(seconds)

    def drawn(self) -> bool:
        """Whether to learn from this round."""
        late = self._lesson.value - self._waiting.value
        share = DELAY * self._round.value / late if late > 0 else MOST
        return self._chance.random() < min(max(share, FEWEST), MOST)


class Mean:
    """The mean of recent values; 0 before the first."""

    def __init__(self) -> None:
        self.value, self._known = 0.0, False

    def add(self, value: float) -> None:
        self.value = MEMORY * self.value + (1 - MEMORY) * value if self._known else value
        self._known = True


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
