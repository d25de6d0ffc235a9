"""The likeliest draft tokens of all requests within a capacity (TETRIS, Wu et al. 2025, arXiv:2502.15197)."""

from __future__ import annotations

from dataclasses import dataclass

from windfall.core.options import option
from windfall.policies.budget import Budget, Load, Sizes
from windfall.policies.shared import SharedPolicy


@dataclass
class Tetris(SharedPolicy):
    """Chains; the `capacity` tokens with the highest path probability of all requests are verified."""

    depth: int = option(6, "tokens to draft for each request", low=1)
    capacity: int | None = option(None, "drafted tokens of a verify pass; none: `mean` for each request", low=1)
    mean: int = option(3, "drafted tokens to verify, on average over the requests", low=1)

    def budget(self) -> Budget:
        return _TetrisBudget(self)


class _TetrisBudget(Budget):
    def __init__(self, policy: Tetris):
        self._policy = policy

    @property
    def largest(self) -> Sizes:
        own = self._policy
        return Sizes(own.depth, 1, 1, 0)

    def sizes(self, load: Load) -> Sizes:
        policy = self._policy
        capacity = policy.mean * load.requests if policy.capacity is None else policy.capacity
        return Sizes(passes=policy.depth, width=1, k=1, rows=load.requests + capacity)
