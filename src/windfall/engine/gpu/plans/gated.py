"""DynaTree, and the fixed tree it compares itself with: breadth-first within bounds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import numpy as np

from windfall.engine.gpu.plans.base import Plan
from windfall.engine.gpu.target import ROWS
from windfall.engine.gpu.transfer import PackedBuffer
from windfall.engine.gpu.view import TreeView
from windfall.kernels.gate import Bounds
from windfall.policies.context import Context
from windfall.policies.papers.dynatree import DynaTree
from windfall.policies.papers.fixed_tree import FixedTree

MOST_GATED = 32  # nodes of a pass, most of which are there in case
SIZES = ROWS[2:]  # of verify passes over as many nodes as there are


class GatedPlan(Plan):
    """Of each level the nodes that are likely enough are expanded, by bounds that the device has; all nodes are
    verified. Probabilities sum to 1, so that few nodes of a level can be likely: the device expands that many, and
    leaves out the children of the others."""

    watches = ("score",)
    gated = True
    policy: DynaTree | FixedTree

    def __init__(self, policy: DynaTree | FixedTree, passes: int, first: int, k: int):
        """`first` is for the root what `k` is for other nodes."""
        widths: list[int] = []
        for _ in range(1, passes):
            drafted = k * widths[-1] if widths else first
            widths.append(min(drafted, int(1.0001 / policy.least)))  # of rounded numbers one more may be likely
        super().__init__(policy, passes, max(widths, default=1), k, 1 + first + k * sum(widths))
        self._drafted = 0
        self._told: Bounds | None = None  # what the device goes by

    @classmethod
    def stands_for(cls, policy: Any) -> bool:
        """Not where the tree may be cut off at its largest size: the host's order of nodes decides what stays."""
        plan = cls(policy)  # type: ignore[call-arg]
        return plan.rows <= 1 + policy.nodes and plan.width <= MOST_GATED

    @property
    def bounds(self) -> Bounds:
        """As they are in this cycle."""
        raise NotImplementedError

    def brief(self, terms: PackedBuffer, ctx: Context) -> None:
        if self.bounds != self._told:
            self._told = self.bounds
            terms.host["bounds"][:] = self._told  # the last copy is through: a pass behind it was waited for
            terms.send()

    def settled(self, ctx: Context) -> int | None:
        return None

    def goes_on(self, level: int, seen: TreeView, ctx: Context) -> bool:
        self._drafted = int(np.count_nonzero(seen.all_scores(level) > -math.inf))
        return level < self.passes and bool(self.policy.goes_on(level, seen.scores(level)).any())

    def verified(self, level: int) -> tuple[int, int]:
        return min(SIZES[bisect_left(SIZES, 1 + self._drafted)], self.rows), level

    def sizes(self) -> Iterable[int]:
        return {min(size, self.rows) for size in SIZES}


class FixedTreePlan(GatedPlan):
    """One first token, then as many children for each likely node."""

    policy: FixedTree

    def __init__(self, policy: FixedTree):
        super().__init__(policy, policy.depth + 1, 1, policy.breadth)

    @property
    def bounds(self) -> Bounds:
        own = self.policy
        return Bounds(math.log(own.least), math.inf, 0.0, 0.0, 0.0, own.breadth, own.breadth, own.breadth, 1)


class DynaTreePlan(GatedPlan):
    """Breadth by confidence, and bounds that the last cycles move."""

    policy: DynaTree

    def __init__(self, policy: DynaTree):
        super().__init__(policy, policy.max_depth, policy.first, policy.widest)

    @property
    def bounds(self) -> Bounds:
        own, now = self.policy, self.policy.steering
        breadths = (own.narrow, own.middle, own.wide)
        return Bounds(math.log(own.least), int(now.depth), own.deep, now.sure, own.unsure, *breadths, own.first)
