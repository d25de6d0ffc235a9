"""What a round teaches about acceptance, for many requests at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from windfall.costs.acceptance import Calibrator
from windfall.costs.correction import Correction
from windfall.policies.budget import Outcome


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
