"""A tree that spends a budget layer by layer, wide where the drafter is unsure, deep where it is sure (TALON, 2026)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.tree import DraftTree, Integers
from windfall.core.types import Grow
from windfall.policies.base import TreePolicy, best_of
from windfall.policies.context import Context


@dataclass
class Talon(TreePolicy):
    """The first layer is the `k` likeliest tokens; each later layer is every candidate whose path probability is at
    least `mu` times the best candidate's, until the budget is spent.

    The paper never stops for low confidence, so a sure drafter is followed one node a pass until the budget is full;
    the paper sets no limit to that: `cap` does. `tally` counts, over all texts, the `cycles` and how many were
    `capped`.
    """

    nodes: int = option(60, "rows of the verify pass, the root counted", low=1)
    k: int = option(10, "nodes of a layer before the gate is used", low=1)
    mu: float = option(0.03, "path probability that passes the gate, as a share of the layer's best", low=0, high=1)
    init_layers: int = option(1, "layers before the gate is used (the paper's ablation: 0 to 3)", low=0)
    cap: int = option(24, "draft passes at the most; the paper has no limit", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tally: Counter[str] = Counter()
        self._kept = np.zeros(1, np.int64)  # [n] nodes of the tree so far, ascending
        self._seen = 1  # nodes that were candidates before
        self._capped = False

    def fresh(self) -> Talon:
        other = super().fresh()
        other.tally = self.tally
        return other

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        if len(tree) == 1:
            self._kept, self._seen, self._capped = np.zeros(1, np.int64), 1, False
            layer = self._kept
        else:
            layer = self._layer(tree, np.arange(self._seen, len(tree)))
            self._kept, self._seen = np.concatenate([self._kept, layer]), len(tree)
        left = self.nodes - len(self._kept)
        if not left or not len(layer):
            return None
        done = int(tree.arrays.depth[layer[0]])
        self._capped = done == self.cap
        if self._capped:
            return None
        return Grow(torch.from_numpy(layer), k=min(self.k, left) if done < self.init_layers else left)

    def _layer(self, tree: DraftTree, candidates: Integers) -> Integers:
        """What passes of the newest candidates, cut to what is left of the budget."""
        left = self.nodes - len(self._kept)
        if not len(candidates):
            return candidates
        if tree.arrays.depth[-1] <= self.init_layers:
            return best_of(tree, candidates, min(self.k, left))
        scores = tree.arrays.score[candidates]
        gate = scores.max() + (math.log(self.mu) if self.mu else -math.inf)
        return best_of(tree, candidates[scores >= gate], left)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        self.tally.update(cycles=1, capped=int(self._capped))
        return torch.from_numpy(self._kept)
