"""The GT principle in batches: every node that is worth a draft step, in each request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.core.options import option
from windfall.policies.budget import Budget, Load, Sizes
from windfall.policies.shared import SharedPolicy


@dataclass
class BatchGT(SharedPolicy):
    """A beam of fixed depth; all nodes whose path probability is above c - eps are verified.

    The paper applies this to chains of 7 tokens and two requests. Here c is measured: a draft pass of the batch over a
    plain step of the batch.
    """

    c: float | None = option(None, "cost of a draft pass, in plain steps; none: as measured on this machine", low=0)
    eps: float = option(0.0, "slack: how much less than c a node may bring", low=0)
    depth: int = option(7, "draft passes", low=1)
    k: int = option(4, "beam width, and children of a node", low=1)
    nodes: int = option(60, "maximum drafted nodes to verify, for each request (open in the paper)", low=1)

    def budget(self) -> Budget:
        return _BatchGTBudget(self)


class _BatchGTBudget(Budget):
    def __init__(self, policy: BatchGT):
        self._policy = policy

    @property
    def largest(self) -> Sizes:
        own = self._policy
        return Sizes(own.depth, own.k, own.k, 0)

    def sizes(self, load: Load) -> Sizes:
        policy, most = self._policy, 1 + self._policy.nodes
        c = load.costs.draft(load.requests * policy.k) / load.verify(load.requests) if policy.c is None else policy.c
        floor = math.log(c - policy.eps) if c > policy.eps else -math.inf
        return Sizes(policy.depth, policy.k, policy.k, load.requests * most, most, floor)
