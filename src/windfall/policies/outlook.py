"""What drafting should bring in the next round, from the trees of recent rounds."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windfall.core.tree import Integers
from windfall.costs.acceptance import CHANCE_BUCKETS, DEPTHS, Calibrator
from windfall.policies.budget import Outcome

Reals = NDArray[np.float64]
MAX_WIDTH = 8  # nodes of a request in one draft pass
TREES_PER_ROUND = 16  # that are recorded, in turn
FEWEST_TREES, MOST_TREES = 16, 64  # that are remembered: as many as there are requests, within these limits
AHEAD = 3  # levels below the drafted ones that are forecast
LEAST = 0.004  # chance of acceptance below which a node is left out


class Nodes(NamedTuple):
    """Drafted and forecast nodes of recent trees."""

    reach: Reals  # [N] chance of acceptance of the whole path
    depth: Integers  # [N]
    width: Integers  # [N] the smallest width of draft passes with which the node is drafted


class Outlook:
    """Remembers the nodes of recent trees, and forecasts those that deeper or wider trees would have had."""

    def __init__(self) -> None:
        self._trees: deque[Nodes] = deque()
        self._turn = 0
        self.version = 0  # increases with every recorded round

    def record(self, outcome: Outcome, calibrator: Calibrator) -> None:
        """Remember some trees of a round with calibrated keys."""
        count = min(outcome.requests, TREES_PER_ROUND)
        wanted = np.zeros(outcome.requests, bool)
        wanted[(self._turn + np.arange(count)) % outcome.requests] = True
        self._turn, self.version = self._turn + count, self.version + 1
        nodes, owner = _complete(outcome, wanted, np.asarray(calibrator.mean_forecasts()))
        for request in np.flatnonzero(wanted):
            self._trees.append(Nodes(*(part[owner == request] for part in nodes)))
        while len(self._trees) > min(max(outcome.requests, FEWEST_TREES), MOST_TREES):
            self._trees.popleft()

    def nodes(self, calibrator: Calibrator) -> tuple[Nodes, int]:
        """All nodes, best first, and the number of trees that they come from."""
        trees = list(self._trees) or [_forecast_tree(np.asarray(calibrator.mean_forecasts()))]
        joined = [np.concatenate(parts) for parts in zip(*trees, strict=True)]
        order = np.argsort(-joined[0], kind="stable")
        return Nodes(*(part[order] for part in joined)), len(trees)


def _complete(outcome: Outcome, wanted: NDArray[np.bool_], forecasts: Reals) -> tuple[Nodes, Integers]:
    """The drafted nodes of these requests and the forecast ones below them, and the request of each."""
    mine = np.flatnonzero(wanted[outcome.owner])
    place = np.full(len(outcome.owner) + 1, -1)  # the last entry is the root's: its place is -1
    place[mine] = np.arange(len(mine))
    parents, owner, depth = place[outcome.parents[mine]], outcome.owner[mine], outcome.depth[mine]
    reach = np.exp(outcome.key[mine].astype(float))
    above = np.where(parents >= 0, reach[parents], 1.0)
    chance = reach / np.maximum(above, 1e-12)
    rank = _rank_in_level(owner, depth, reach)
    width = np.ones(len(mine), np.int64)
    for level in range(2, int(depth.max(initial=0)) + 1):
        here = depth == level
        up = parents[here]
        width[here] = np.maximum(width[up], rank[up] + 1)
    drafted = Nodes(reach, depth, width)
    tips = ~outcome.expanded[mine] & (rank < MAX_WIDTH) & (reach > LEAST)
    ahead, tip = _descend(
        Nodes(reach[tips], depth[tips], np.maximum(width, rank + 1)[tips]), chance[tips], forecasts, AHEAD
    )
    likely = reach > LEAST
    nodes = Nodes(*(np.concatenate([own[likely], more]) for own, more in zip(drafted, ahead, strict=True)))
    return nodes, np.concatenate([owner[likely], owner[tips][tip]])


def _rank_in_level(owner: Integers, depth: Integers, reach: Reals) -> Integers:
    """Each node's place among the nodes of its request and depth, the best first."""
    level = owner * (int(depth.max(initial=0)) + 1) + depth
    order = np.lexsort((-reach, level))
    sorted_levels = level[order]
    fresh = np.concatenate([[True], sorted_levels[1:] != sorted_levels[:-1]])[: len(order)]
    starts = np.flatnonzero(fresh)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order)) - starts[np.cumsum(fresh) - 1]
    return rank


def _descend(tips: Nodes, chance: Reals, forecasts: Reals, levels: int) -> tuple[Nodes, Integers]:
    """The forecast nodes up to `levels` below unexpanded nodes, and the tip above each.

    A tip's `width` is the one with which it is expanded. Below the first level, only the two best children of a node
    are followed.
    """
    found: list[Nodes] = []
    above: list[Integers] = []
    origin = np.arange(len(tips.reach))
    for _ in range(levels):
        bucket = np.searchsorted(CHANCE_BUCKETS, chance)
        children = forecasts[np.minimum(tips.depth, DEPTHS - 1), bucket]  # [tips, children]
        reach = tips.reach[:, None] * children
        shape = reach.shape
        depth, width = (np.broadcast_to(part[:, None], shape) for part in (tips.depth + 1, tips.width))
        source = np.broadcast_to(origin[:, None], shape)
        likely = reach > LEAST
        found.append(Nodes(reach[likely], depth[likely], width[likely]))
        above.append(source[likely])
        follow = likely.copy()
        follow[:, 2:] = False
        expanded_with = width + np.arange(shape[1])
        follow &= expanded_with <= MAX_WIDTH
        tips = Nodes(reach[follow], depth[follow], expanded_with[follow])
        chance, origin = children[follow], source[follow]
    nodes = Nodes(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
    return nodes, np.concatenate(above)


def _forecast_tree(forecasts: Reals) -> Nodes:
    """A tree before anything was drafted."""
    one = np.ones(1, np.int64)
    return _descend(Nodes(np.ones(1), one - 1, one), np.ones(1), forecasts, AHEAD + 1)[0]
