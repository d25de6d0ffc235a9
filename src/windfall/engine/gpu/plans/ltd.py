"""LTD: depth and rows by two networks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from windfall.engine.gpu.plans.base import Plan
from windfall.engine.gpu.view import Order, TreeView
from windfall.policies.context import Context
from windfall.policies.papers.ltd import LTD, NOTHING, View


class LTDPlan(Plan):
    """A beam of which two networks choose the depth and the rows to verify."""

    policy: LTD

    def __init__(self, policy: LTD):
        pair, rules, width = policy.pair, policy.pair.rules, policy.width
        passes = rules.max_depth if pair.depth else min(rules.fixed_depth, rules.max_depth)
        super().__init__(policy, passes, width, width, 1 + (rules.sizes[-1] if pair.size else rules.fixed_size))
        self.watches = ("score", "length")
        self._order: Order | None = None
        if rules.layout != "ranked" or policy.entropy:  # then the order of nodes matters
            self.watches += ("expanded", "entropy") if policy.entropy else ("expanded",)
            self._order = Order(self.nodes, width)
        self._verified = min(self.rows, self.nodes)

    def settled(self, ctx: Context) -> int | None:
        return None if self.policy.pair.depth or self.policy.pair.size else self.passes

    def least(self) -> int:
        return next(level for level in range(1, self.passes + 1) if self.asks(level))

    def asks(self, level: int) -> bool:
        pair = self.policy.pair
        return level >= self.passes or (pair.depth is not None and pair.rules.asks(level))

    def goes_on(self, level: int, seen: TreeView, ctx: Context) -> bool:
        pair = self.policy.pair
        if self._order is not None and level == self.least():
            self._order.begin()
        if level < self.passes and not pair.stops(self._newest(level, seen)):
            return True
        self._verified = min(1 + pair.nodes(self._whole(level, seen)), self.places(level))
        return False

    def _newest(self, level: int, seen: TreeView) -> View:
        """What the depth policy looks at."""
        if self._order is None:
            return View(seen.scores(level), seen.length, level, NOTHING)
        scores, entropies = self._order.follow(level, seen, self.policy.entropy)
        return View(scores[-1], seen.length, level, entropies[-1])

    def _whole(self, level: int, seen: TreeView) -> View:
        """What the size policy looks at."""
        if self._order is None:
            every = seen.all_scores(level)
            if every[every.argmin()] == -math.inf:
                every = every[every > -math.inf]
            return View(every, seen.length, level, NOTHING)
        scores, entropies = self._order.follow(level, seen, self.policy.entropy)
        return View(np.concatenate(scores), seen.length, level, np.concatenate(entropies))

    def verified(self, level: int) -> tuple[int, int]:
        return self._verified, level

    def sizes(self) -> Iterable[int]:
        rules, levels = self.policy.pair.rules, range(self.least(), self.passes + 1)
        chosen = rules.sizes if self.policy.pair.size else (rules.fixed_size,)
        return {min(1 + size, self.places(level)) for size in chosen for level in levels}
