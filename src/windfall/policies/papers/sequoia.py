"""The best fixed tree for a measured acceptance vector (Sequoia, Chen et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from windfall.core.options import option
from windfall.costs.curves import Costs
from windfall.policies.context import Context
from windfall.policies.shape import Shape
from windfall.policies.static_trees import EXAMPLE, BestTrees, StaticTreePolicy, parse_vector

SIZING = ("quickest", "largest")
best_trees = lru_cache(maxsize=16)(BestTrees)


@lru_cache(maxsize=64)
def largest(acceptance: tuple[float, ...], nodes: int, depth: int) -> Shape:
    """The tree with the most expected tokens, at any cost."""
    known = best_trees(acceptance, nodes, depth)
    return Shape(known.paths(int(known.best[depth].argmax()), depth))


@lru_cache(maxsize=64)
def quickest(acceptance: tuple[float, ...], nodes: int, depth: int, costs: Costs, length: int) -> Shape:
    """The tree with the fewest seconds a token: passes * draft + verify(rows), over tokens."""
    known, verify = best_trees(acceptance, nodes, depth), np.array([0.0, *costs.verify_curve(nodes, length)])
    widths = [[-(-rows // max(passes, 1)) for rows in range(nodes + 1)] for passes in range(depth + 1)]
    drafts = [[passes * costs.draft(max(w, 1)) for w in row] for passes, row in enumerate(widths)]
    drafts[1:] = [[seconds + costs.opening for seconds in row] for row in drafts[1:]]
    tokens = np.array(known.best)  # [depth, m]
    seconds = np.where(tokens > 0, (np.array(drafts) + verify + costs.overhead) / tokens.clip(1), np.inf)
    passes, rows = np.unravel_index(seconds.argmin(), seconds.shape)
    return Shape(known.paths(int(rows), int(passes)))


@dataclass
class Sequoia(StaticTreePolicy):
    """The tree with the most expected tokens, if the child of rank b is the right one with probability acceptance[b].

    The paper counts the root as a level; `depth` here is the number of draft passes. It allows the sizes 1, 2, 4, ...
    when it looks for the quickest tree; here every size up to `nodes` may win, and a pass is priced at its mean width.
    """

    uses_costs: ClassVar[bool] = True

    acceptance: str = option(
        EXAMPLE, "probability that the child of each rank is correct; the default is an example: measure"
    )
    nodes: int = option(64, "rows of the verify pass, the root counted", low=1, high=512)
    depth: int = option(9, "maximum draft passes", low=1, high=64)
    sizing: str = option("quickest", "quickest by this machine's costs, or the largest allowed", choices=SIZING)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._vector = parse_vector(self.acceptance, "acceptance")

    def layout(self, ctx: Context) -> Shape:
        if self.sizing == "largest":
            return largest(self._vector, self.nodes, self.depth)
        return quickest(self._vector, self.nodes, self.depth, ctx.costs, -(-ctx.length // 256) * 256)

    @property
    def most(self) -> tuple[int, int, int]:
        return self.depth, len(self._vector), self.nodes
