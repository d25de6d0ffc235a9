"""Breadth by confidence, depth by path probability, both steered by what was accepted lately (DynaTree, 2026)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from windfall.core.options import option
from windfall.core.types import Step
from windfall.policies.base import NEVER, TreePolicy
from windfall.policies.papers.bounded import bounded_plan
from windfall.policies.plan import Bounds, Plan


@dataclass
class Steering:
    """The options that the history changes, `base_depth`, `sure` and `rho_deep`, with their current values."""

    depth: float
    sure: float
    deep: float
    recent: deque[float]  # acceptance, newest last


@dataclass
class DynaTree(TreePolicy):
    """Breadth-first; a node gets 1, 2 or 3 children by the drafter's confidence, and paths go on while likely.

    Depths count drafted tokens, as the release does. `tau`, `rho_stop` and `rho_deep` are in the release only. The
    paper's text branches at the root, its algorithm takes one first token: `root_branching`. The paper adapts every
    cycle (within a text) without giving window, target and rates; the release adapts once per text, so there the
    policies of all texts share one history. "Accepted" is, in the paper, the share of drafted nodes that were
    committed; in the release, tokens per cycle over `base_depth` + 2.
    """

    nodes: int = option(256, "maximum drafted nodes", low=1)
    base_depth: int = option(5, "longest ordinary path", low=1)
    max_depth: int = option(8, "longest path (9 on PG-19)", low=1)
    narrow: int = option(1, "children where the drafter is sure", low=1)
    middle: int = option(2, "children in between", low=1)
    wide: int = option(3, "children where it is unsure", low=1)
    sure: float = option(0.9, "sure: its best token has this probability at least", low=0, high=1)
    unsure: float = option(0.4, "unsure: its best token has less than this", low=0, high=1)
    tau: float = option(0.05, "less likely nodes are not expanded", low=0, high=1)
    rho_stop: float = option(0.1, "a second limit like tau; the larger of the two applies", low=0, high=1)
    rho_deep: float = option(0.5, "paths go beyond base_depth while likelier than this", low=0, high=1)
    root_branching: bool = option(False, "branch at the first token too, as the paper's text has it")
    history: str = option("paper", "how acceptance steers the tree", choices=("paper", "release", "none"))
    window: int = option(10, "cycles (release: texts) of history; not in the paper", low=1)
    target: float = option(0.7, "acceptance to steer for; not in the paper", low=0, high=1)
    eta_depth: float = option(1.0, "change of base_depth per unit of error; not in the paper", low=0)
    eta_sure: float = option(0.05, "change of sure per unit of error; not in the paper", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steering = Steering(self.base_depth, self.sure, self.rho_deep, deque(maxlen=self.window))
        self._committed = self._cycles = 0  # of this text

    def fresh(self) -> DynaTree:
        other = super().fresh()
        if self.history == "release":
            other.steering = self.steering
        return other

    def plan(self) -> Plan:
        widest = max(self.narrow, self.middle, self.wide)
        first = widest if self.root_branching else 1
        return bounded_plan(self._bounds, self.max_depth, first, widest, self._least, self.nodes)

    @property
    def _least(self) -> float:
        """Less likely nodes are not expanded."""
        return max(self.tau, self.rho_stop, NEVER)

    def _bounds(self) -> Bounds:
        now = self.steering
        deep = math.log(max(now.deep, NEVER))
        first = max(self.narrow, self.middle, self.wide) if self.root_branching else 1
        breadths = (self.narrow, self.middle, self.wide, first)
        return Bounds(math.log(self._least), int(now.depth), deep, now.sure, self.unsure, *breadths)

    def observe(self, step: Step) -> None:
        if self.history == "paper" and len(step.tree) > 1:  # a cycle without a draft says nothing
            self._adapt(step.accepted / (len(step.tree) - 1))
        self._committed, self._cycles = self._committed + step.accepted + 1, self._cycles + 1
        if self.history == "release" and step.finish:
            self._adapt(self._committed / self._cycles / (self.base_depth + 2))

    def _adapt(self, accepted: float) -> None:
        now, highest = self.steering, max(self.max_depth - 1, 1)
        now.recent.append(accepted)
        error = sum(now.recent) / len(now.recent) - self.target
        if self.history == "paper":  # proportional
            now.depth = _clip(now.depth + self.eta_depth * error, 1, highest)
            now.sure = _clip(now.sure - self.eta_sure * error, 0, 1)
        elif len(now.recent) >= 5 and abs(error) > 0.1:  # the release's steps and bounds
            sign = math.copysign(1, error)
            now.depth = _clip(now.depth + sign, min(2, highest), highest)
            now.sure = _clip(now.sure - sign * 0.05, 0.5, 0.95)
            now.deep = _clip(now.deep - sign * 0.05, 0.3, 0.8)


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
