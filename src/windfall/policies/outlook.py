"""What drafting should bring in the next round, from the trees of recent rounds."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windfall.core.tree import Integers
from windfall.costs.acceptance import CHANCE_BUCKETS, FORECAST_CHILDREN, Calibrator
from windfall.policies.budget import Outcome

Reals = NDArray[np.float64]
MAX_WIDTH = 8  # nodes of a request in one draft pass
FEWEST_TREES, MOST_TREES = 6, 64  # that are remembered: about as many as there are requests, within these limits
AHEAD = 2  # levels below the drafted ones that are forecast
MOST_NODES = 512  # that are considered, the best of all trees
FIRST_FAMILIES, MOST_FAMILIES = 4.0, 96.0  # that a forecast is the mean of: those of the calibrator count this much
LEAST = 0.004  # chance of acceptance below which a node is left out


class Nodes(NamedTuple):
    """Drafted and forecast nodes of recent trees."""

    reach: Reals  # [N] chance of acceptance of the whole path
    depth: Integers  # [N]
    width: Integers  # [N] the smallest width of draft passes with which the node is drafted

    def take(self, places: Integers) -> Nodes:
        """The nodes in these places."""
        return Nodes(self.reach[places], self.depth[places], self.width[places])


class Outlook:
    """Remembers the nodes of recent trees, and forecasts those that deeper or wider trees would have had."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[Nodes, int]] = deque()  # the best nodes of a round, and the number of its trees
        self._turn = 0
        self._children: Children | None = None

    def record(self, outcome: Outcome, calibrator: Calibrator) -> None:
        """Remember trees of a round with calibrated keys; of very many requests, some in turn."""
        children = self._forecasts(calibrator)
        count = min(outcome.requests, MOST_TREES)
        wanted = np.zeros(outcome.requests, bool)
        wanted[(self._turn + np.arange(count)) % outcome.requests] = True
        self._turn += count
        self._rounds.append((_best(_complete(outcome, wanted, children)), count))
        while sum(trees for _, trees in self._rounds) - self._rounds[0][1] >= max(count, FEWEST_TREES):
            self._rounds.popleft()

    def nodes(self, calibrator: Calibrator) -> tuple[Nodes, int]:
        """The best nodes, best first, and the number of trees that they come from."""
        rounds = list(self._rounds) or [(_best(_forecast_tree(self._forecasts(calibrator))), 1)]
        if len(rounds) == 1:
            return rounds[0]
        joined = Nodes(*(np.concatenate(parts) for parts in zip(*(nodes for nodes, _ in rounds), strict=True)))
        return _best(joined), sum(trees for _, trees in rounds)

    def _forecasts(self, calibrator: Calibrator) -> Children:
        if self._children is None:
            self._children = Children(calibrator)
        return self._children


class Children:
    """The mean chances of the children of a node, by rank: of the root, or by the chance of a deeper node."""

    def __init__(self, calibrator: Calibrator):
        known = np.asarray(calibrator.mean_forecasts())[:2]  # [root or deeper, range of the chance, children]
        self._count = np.full((2, len(CHANCE_BUCKETS) + 1, 1), FIRST_FAMILIES)
        self._sum = known * self._count

    def learn(self, owner: Integers, parents: Integers, rank: Integers, chance: Reals) -> None:
        """Learn from drafted nodes, siblings next to each other; `parents` is -1 below a root."""
        starts = np.ones(len(owner), bool)
        starts[1:] = (parents[1:] != parents[:-1]) | (owner[1:] != owner[:-1])
        first, kept = np.flatnonzero(starts), rank < FORECAST_CHILDREN
        seen = np.zeros((len(first), FORECAST_CHILDREN))
        seen[(np.cumsum(starts) - 1)[kept], rank[kept]] = chance[kept]
        above = parents[first]
        place = np.minimum(above + 1, 1), np.searchsorted(CHANCE_BUCKETS, np.where(above >= 0, chance[above], 1.0))
        kept_share = np.minimum(MOST_FAMILIES / self._count, 1.0)
        self._count, self._sum = self._count * kept_share, self._sum * kept_share
        np.add.at(self._sum, place, seen)
        np.add.at(self._count, place, 1.0)

    def of(self, depth: Integers, chance: Reals) -> Reals:
        """[n, children]: the chances of the children of nodes with this depth and chance."""
        place = np.minimum(depth, 1), np.searchsorted(CHANCE_BUCKETS, chance)
        found: Reals = (self._sum / self._count)[place]
        return found


def _best(nodes: Nodes) -> Nodes:
    """The nodes that are considered, best first."""
    return nodes.take(np.argsort(-nodes.reach, kind="stable")[:MOST_NODES])


def _complete(outcome: Outcome, wanted: NDArray[np.bool_], children: Children) -> Nodes:
    """The likely drafted nodes of these requests, and the forecast ones below them."""
    mine = np.flatnonzero(wanted[outcome.owner] & (outcome.key > math.log(LEAST)))
    place = np.full(len(outcome.owner) + 1, -1)  # the last entry is the root's: its place is -1
    place[mine] = np.arange(len(mine))
    parents, owner, depth = place[outcome.parents[mine]], outcome.owner[mine], outcome.depth[mine]
    reach = np.exp(outcome.key[mine].astype(float))
    chance = reach / np.maximum(np.where(parents >= 0, reach[parents], 1.0), 1e-12)
    children.learn(owner, parents, outcome.rank[mine], chance)
    rank = _rank_in_level(owner, depth, reach)
    width = np.ones(len(mine), np.int64)
    for level in range(2, int(depth.max(initial=0)) + 1):
        here = np.flatnonzero(depth == level)
        up = parents[here]
        width[here] = np.maximum(width[up], rank[up] + 1)
    tips = ~outcome.expanded[mine] & (rank < MAX_WIDTH)
    known = Nodes(reach[tips], depth[tips], np.maximum(width, rank + 1)[tips])
    ahead = _descend(known, chance[tips], children, AHEAD)
    return Nodes(*(np.concatenate(parts) for parts in zip(Nodes(reach, depth, width), ahead, strict=True)))


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


def _descend(tips: Nodes, chance: Reals, forecasts: Children, levels: int) -> Nodes:
    """The forecast nodes up to `levels` below unexpanded nodes.

    A tip's `width` is the one with which it is expanded. Below the first level, only the two best children of a node
    are followed.
    """
    found: list[Nodes] = []
    for _ in range(levels):
        children = forecasts.of(tips.depth, chance)
        reach = tips.reach[:, None] * children
        shape = reach.shape
        depth, width = (np.broadcast_to(part[:, None], shape) for part in (tips.depth + 1, tips.width))
        likely = reach > LEAST
        found.append(Nodes(reach[likely], depth[likely], width[likely]))
        follow = likely.copy()
        follow[:, 2:] = False
        expanded_with = width + np.arange(shape[1])
        follow &= expanded_with <= MAX_WIDTH
        tips = Nodes(reach[follow], depth[follow], expanded_with[follow])
        chance = children[follow]
    return Nodes(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _forecast_tree(forecasts: Children) -> Nodes:
    """A tree before anything was drafted."""
    one = np.ones(1, np.int64)
    return _descend(Nodes(np.ones(1), one - 1, one), np.ones(1), forecasts, AHEAD + 1)
