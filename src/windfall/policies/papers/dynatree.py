"""Breadth by confidence, depth by path probability, both steered by what was accepted lately (DynaTree, 2026)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.tree import DraftTree, Flags, Floats, Integers
from windfall.core.types import Grow, Step
from windfall.policies.base import NEVER, TreePolicy
from windfall.policies.context import Context


@dataclass
class Steering:
    """What the history moves: the options `base_depth`, `sure` and `rho_deep` as they stand now."""

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

    nodes: int = option(256, "drafted nodes at the most", low=1)
    base_depth: int = option(5, "longest ordinary path", low=1)
    max_depth: int = option(8, "longest path (9 on PG-19)", low=1)
    narrow: int = option(1, "children where the drafter is sure", low=1)
    middle: int = option(2, "children in between", low=1)
    wide: int = option(3, "children where it is unsure", low=1)
    sure: float = option(0.9, "sure: its best token has this probability at least", low=0, high=1)
    unsure: float = option(0.4, "unsure: its best token has less than this", low=0, high=1)
    tau: float = option(0.05, "less likely nodes are not expanded", low=0, high=1)
    rho_stop: float = option(0.1, "the same once more: the larger of the two counts", low=0, high=1)
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
        self._kept = np.zeros(1, np.int64)  # [n] nodes of the tree so far, in the order of the queue
        self._seen = 1  # nodes that were looked at before
        self._committed = self._cycles = 0  # of this text

    def fresh(self) -> DynaTree:
        other = super().fresh()
        if self.history == "release":
            other.steering = self.steering
        return other

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        if len(tree) == 1:
            self._kept, self._seen = np.zeros(1, np.int64), 1
            return Grow(torch.from_numpy(self._kept), k=self.first)
        level = self._branches(tree, np.arange(self._seen, len(tree)))
        self._kept, self._seen = np.concatenate([self._kept, level])[: self.nodes + 1], len(tree)
        level = level[self.goes_on(tree.arrays.depth[level], tree.arrays.score[level])]
        if not len(level) or len(self._kept) > self.nodes:
            return None
        return Grow(torch.from_numpy(level), k=self.widest)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        return torch.from_numpy(self._kept)

    @property
    def widest(self) -> int:
        """Children of a node at the most."""
        return max(self.narrow, self.middle, self.wide)

    @property
    def first(self) -> int:
        """The same of the root."""
        return self.widest if self.root_branching else 1

    @property
    def least(self) -> float:
        """Less likely nodes are not expanded."""
        return max(self.tau, self.rho_stop, NEVER)

    @property
    def deep(self) -> float:
        """The score above which paths go beyond the ordinary depth."""
        return math.log(max(self.steering.deep, NEVER))

    def _branches(self, tree: DraftTree, new: Integers) -> Integers:
        """The newest nodes, without those beyond their parent's breadth."""
        known = tree.arrays
        parents, rank = known.parents[new], known.rank[new]
        first = new[rank == 0]
        sureness = np.zeros(len(tree), np.float32)  # of the drafter, after each node
        sureness[known.parents[first]] = np.exp(known.logq[first])
        confidence = sureness[parents]
        breadth = np.where(confidence >= self.steering.sure, self.narrow, self.middle)
        return new[rank < np.where(confidence < self.unsure, self.wide, breadth)]

    def goes_on(self, depth: Integers | int, score: Floats) -> Flags:
        """Which of these nodes the depth gate lets through."""
        deep = (depth < int(self.steering.depth)) | (score > self.deep)
        return deep & (depth < self.max_depth) & (score >= math.log(self.least))

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
