"""The rows with the most tokens per second by survival estimates (vLLM's adaptive verification, PR 47808, for trees).

vLLM verifies chains. A token's survival is the product of the estimated acceptance of all tokens up to it; without a
confidence head, the estimate is an online logistic fit of the drafter's confidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windfall.core.options import option
from windfall.costs.acceptance import DEPTHS, Calibrator, Floats
from windfall.policies.budget import Budget, Load, Outcome, Sizes
from windfall.policies.shared import SharedPolicy

FIRST_SLOPE, FIRST_BIAS = 0.5, -0.2  # before the first outcome
PRIOR_OBSERVATIONS = 4.0  # weight of these, for each parameter
MEMORY = 0.995  # share of the evidence that is kept per round


@dataclass
class Survival(SharedPolicy):
    """A beam of fixed depth; verifies the most likely accepted nodes, as many as the cost curve says is fastest."""

    depth: int = option(5, "draft passes", low=1)
    k: int = option(4, "beam width, and children of a node; 1: chains, as in vLLM", low=1)
    nodes: int = option(60, "maximum drafted nodes to verify, for each request", low=1)

    def budget(self) -> Budget:
        return _SurvivalBudget(self)


class _SurvivalBudget(Budget):
    calibrator: _Estimator

    def __init__(self, policy: Survival):
        self._policy = policy
        self.calibrator = _Estimator()
        self._survivals = np.zeros(0)  # of the last round, for each request, best first
        self._requests = 0  # of the last round

    @property
    def largest(self) -> Sizes:
        own = self._policy
        return Sizes(own.depth, own.k, own.k, 0, calibrated=True)

    def sizes(self, load: Load) -> Sizes:
        policy, requests = self._policy, load.requests
        most = 1 + policy.nodes
        rows = np.array(load.sizes(requests * most))
        if self._requests:
            sums = np.concatenate([[0.0], np.cumsum(self._survivals)]) * requests / self._requests
            places = np.arange(len(sums)) * requests / self._requests
            drafting = load.drafting(policy.depth, policy.k)
            seconds = np.array([load.verify(int(size)) for size in rows]) + drafting
            speed = (requests + np.interp(rows - requests, places, sums)) / seconds
            best = int(rows[int(np.argmax(speed))])
        else:
            best = requests * most
        return Sizes(policy.depth, policy.k, policy.k, best, most, calibrated=True)

    def observe(self, outcome: Outcome) -> None:
        self._survivals, self._requests = -np.sort(-np.exp(outcome.key)), outcome.requests
        known = (outcome.parents < 0) | outcome.accepted[outcome.parents]
        seen = outcome.verified & known
        self.calibrator.fit(outcome.logq[seen], outcome.accepted[seen].astype(float))


class _Estimator(Calibrator):
    """Acceptance by position: σ(slope · logit(q) + bias), the same for all depths and ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weights[0] = FIRST_SLOPE
        self.weights[1 : 1 + DEPTHS] = FIRST_BIAS
        self._known = np.eye(2) * PRIOR_OBSERVATIONS

    def fit(self, logq: NDArray[Any], accepted: Floats) -> None:
        """One Newton step on the logistic loss."""
        if not len(logq):
            return
        zero = np.zeros(len(logq), np.int64)
        features, chance = self._features(logq, zero + 1, zero)[:, :2], self.probabilities(logq, zero + 1, zero)
        self._known = MEMORY * self._known + (features * (chance * (1 - chance))[:, None]).T @ features
        slope, bias = np.linalg.solve(self._known, features.T @ (accepted - chance))
        self.weights[0] += slope
        self.weights[1 : 1 + DEPTHS] += bias
