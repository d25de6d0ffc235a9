"""A single line of drafted tokens (Leviathan et al. 2023; Chen et al. 2023), with transformers' two ways to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from windfall.core.options import option
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, Step
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context


@dataclass
class Chain(TreePolicy):
    """The drafter's likeliest token, its likeliest successor, and so on.

    `confidence` and `schedule` are transformers' assisted generation. The schedule starts anew with every text
    (transformers calls that heuristic_transient) and leaves the length as it is where nothing was drafted.
    """

    depth: int = option(5, "tokens to draft; with a schedule, to begin with", low=1)
    confidence: float = option(0.0, "stop after a token less probable than this; 0: never", low=0, high=1)
    schedule: str = option(
        "fixed", "heuristic: 2 tokens more after a cycle that accepted all, else 1 less", choices=("fixed", "heuristic")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._length = self.depth
        self._least = math.log(self.confidence) if self.confidence else -math.inf

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        depth, logq = tree.arrays.depth, tree.arrays.logq
        if depth[-1] >= self._length or logq[-1] < self._least:
            return None
        return Grow(torch.from_numpy(np.array([len(tree) - 1])), k=1)

    def observe(self, step: Step) -> None:
        drafted = len(step.tree) - 1
        if self.schedule == "heuristic" and drafted:
            self._length = self._length + 2 if step.accepted == drafted else max(self._length - 1, 1)
