"""A node is kept if its benefit over its cost exceeds the current speed-up (SMART, arXiv:2604.09731)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from windfall.core.options import option
from windfall.policies.budget import Budget, Load, Outcome, Sizes
from windfall.policies.shared import SharedPolicy


@dataclass
class Smart(SharedPolicy):
    """A beam that verifies a node, or drafts a level, if it brings more tokens per second than the batch has now.

    The benefit of a node is its path probability. Its cost is what one more row adds to the measured verify pass. A
    level is opened if the nodes that it brought in the last round were worth a draft pass.
    """

    depth: int = option(8, "maximum draft passes", low=1)
    k: int = option(4, "beam width, and children of a node", low=1)
    nodes: int = option(60, "maximum drafted nodes to verify, for each request", low=1)
    eta: float = option(0.2, "weight of the last round in the average speed", low=0, high=1)

    def budget(self) -> Budget:
        return _SmartBudget(self)


class _SmartBudget(Budget):
    def __init__(self, policy: Smart):
        self._policy = policy
        self._passes = policy.depth
        self._rows = 0  # of the last round
        self._speed = 0.0  # tokens per second of the recent rounds, for each request
        self._load: Load | None = None

    @property
    def largest(self) -> Sizes:
        own = self._policy
        return Sizes(own.depth, own.k, own.k, 0)

    def sizes(self, load: Load) -> Sizes:
        policy, requests = self._policy, load.requests
        self._load = load
        speed = requests * self._speed or requests / load.verify(requests)
        rows = max(self._rows, requests)
        price = speed * (load.verify(2 * rows) - load.verify(rows)) / rows
        floor = math.log(price) if price > 0 else -math.inf
        most = 1 + policy.nodes
        return Sizes(self._passes, policy.k, policy.k, requests * most, most, floor)

    def observe(self, outcome: Outcome) -> None:
        policy, load, requests = self._policy, self._load, outcome.requests
        if load is None:
            return
        self._rows = requests + int(outcome.verified.sum())
        seconds = load.drafting(outcome.sizes.passes, policy.k) + load.verify(self._rows)
        speed = (requests + float(outcome.accepted.sum())) / seconds
        self._speed += (policy.eta if self._speed else 1.0) * (speed / requests - self._speed)
        fee = requests * self._speed * load.costs.draft(requests * policy.k)
        gains = np.bincount(outcome.depth[outcome.verified], np.exp(outcome.key[outcome.verified]))[1:]
        paying = int(np.argmin(gains > fee)) if (gains <= fee).any() else len(gains)
        more = paying + 1 if paying == outcome.sizes.passes else paying
        self._passes = min(max(more, 1), policy.depth)
