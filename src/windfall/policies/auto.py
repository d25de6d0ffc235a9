"""The tree that earns most per second, by this machine's measured costs and calibrated acceptance. See docs/auto.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windfall.calibration import CHILDREN, Calibrator, Floats
from windfall.options import option
from windfall.policies.base import TreePolicy, best
from windfall.records import Context, Grow
from windfall.tree import DraftTree

Nodes = NDArray[np.int64]
AHEAD = 4  # further passes looked ahead
WIDEST = 32  # nodes expanded in one pass at the most
TRIAL = 3  # rows to begin with; one more for every three judged nodes
CURIOSITY = 0.01  # share of the time that may go into drafts that promise nothing


@dataclass
class Auto(TreePolicy):
    """Maximises (1 + Σ acceptance) / (draft passes + verify(rows) + overhead) over time; nothing to tune.

    After each draft pass it asks whether another would pay, and in the end how many rows to verify: none is plain
    decoding. When drafting does not pay it stops, spending no more than a hundredth of the time on looking whether it
    pays again.
    """

    uses_costs: ClassVar[bool] = True

    nodes: int = option(64, "rows of a verify pass at the most, the root counted: memory's limit, not taste's", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._plain_seconds = 0.0  # decoded without drafting since the last look
        self._cycle = Cycle()
        self._curves: dict[int, Floats] = {}

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        cycle = self._cycle
        if ctx.room < 2:
            return None
        if cycle.expanded and len(tree) == len(cycle.reach):  # the last pass brought nothing
            cycle.learn(tree, ctx.calibrator)
            return None
        cycle.learn(tree, ctx.calibrator)
        chosen = self._next_pass(cycle, tree, ctx)
        if chosen is None:
            return None
        cycle.expand(chosen, ctx.costs.draft(len(chosen)))
        return Grow(torch.from_numpy(chosen), k=CHILDREN)

    def _next_pass(self, cycle: Cycle, tree: DraftTree, ctx: Context) -> Nodes | None:
        """The nodes of another draft pass, if it pays, or costs next to nothing."""
        if not cycle.expanded and _price(ctx, ctx.costs.draft(1)) < CURIOSITY:
            return np.zeros(1, dtype=np.int64)
        prices = self._prices(ctx)
        profit, rows = best_profit(cycle.values, prices)
        chosen = worth_expanding(cycle, tree, ctx, marginal(prices, rows))
        if not len(chosen):
            return None
        if _price(ctx, ctx.costs.draft(len(chosen))) < CURIOSITY:  # as cheap to look as to think about it
            return chosen
        if foreseen_profit(cycle, chosen, tree, ctx, prices, profit) > profit:
            return chosen
        if cycle.expanded or self._plain_seconds * CURIOSITY < ctx.costs.draft(1):
            return None
        self._plain_seconds = 0.0  # just curious
        return chosen

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        cycle, self._cycle = self._cycle, Cycle()
        cycle.learn(tree, ctx.calibrator)
        seconds = self._seconds(ctx)
        rows = best_profit(cycle.values, self._prices(ctx))[1] if len(tree) > 1 else 0
        expected = 1 + float(cycle.values[:rows].sum())
        ctx.calibrator.pace(expected, float(seconds[rows]) + cycle.spent, float(seconds[0]))
        if not rows:
            ctx.calibrator.relax()
            self._plain_seconds += float(seconds[0])
            return torch.zeros(1, dtype=torch.long)
        believed = replace(tree, score=torch.from_numpy(np.log(np.maximum(cycle.reach, 1e-300))))
        return best(believed, torch.arange(len(tree)), rows + 1)

    def _seconds(self, ctx: Context) -> Floats:
        """Of a cycle's target pass over 1, 2, … rows at about this length."""
        place = ctx.length // 128
        if place not in self._curves:
            curve = ctx.costs.verify_curve(self.nodes, ctx.length)
            self._curves[place] = np.array(curve) + ctx.costs.overhead
        return self._curves[place]

    def _prices(self, ctx: Context) -> Floats:
        """The same in tokens: what could be earned elsewhere in that time, at the present pace.

        Only for as many rows as the calibrator has earned trust for: a new drafter is tried with few.
        """
        seconds, trusted = self._seconds(ctx), TRIAL + ctx.calibrator.observed // TRIAL
        prices: Floats = seconds[:trusted] * (ctx.calibrator.gain / seconds[0])
        return prices


class Cycle:
    """What is known about the nodes drafted in this cycle."""

    def __init__(self) -> None:
        self.chance = np.ones(1)  # [N] of a node to be accepted if its parent is
        self.reach = np.ones(1)  # [N] of a node to be accepted
        self.expanded: list[int] = []
        self.spent = 0.0  # seconds of drafting
        self._fresh: list[int] = []  # expanded in the last pass

    @property
    def values(self) -> Floats:
        """The drafted nodes' acceptance, best first."""
        return -np.sort(-self.reach[1:])

    def expand(self, nodes: Nodes, seconds: float) -> None:
        self._fresh = nodes.tolist()
        self.expanded += self._fresh
        self.spent += seconds

    def learn(self, tree: DraftTree, calibrator: Calibrator) -> None:
        """Take in the nodes drafted last, and teach the calibrator what children such nodes turn out to have."""
        known = len(self.reach)
        parents = tree.parents[known:].numpy()
        if len(parents):
            chance = calibrator.accept(tree, known)
            chance /= np.maximum(np.bincount(parents, chance)[parents], 1.0)  # one sibling at the most is accepted
            self.chance = np.concatenate([self.chance, chance])
            reach = self.reach.tolist()
            for parent, own in zip(parents.tolist(), chance.tolist(), strict=True):
                reach.append(reach[parent] * own)
            self.reach = np.array(reach)
        for node in self._fresh:
            children = self.chance[known:][parents == node]
            calibrator.foresee(int(tree.depth[node]), float(self.chance[node]), children)
        self._fresh = []


def best_profit(values: Floats, prices: Floats) -> tuple[float, int]:
    """The most that verifying some of these nodes earns, in tokens net of time, and how many of them that takes."""
    earned = np.zeros(min(len(values), len(prices) - 1) + 1)
    np.cumsum(values[: len(earned) - 1], out=earned[1:])
    earned -= prices[: len(earned)]
    rows = int(earned.argmax())
    return float(earned[rows]), rows


def marginal(prices: Floats, rows: int) -> float:
    """The price of one more row, on the way to the best larger pass."""
    if rows + 1 >= len(prices):
        return float("inf")
    return float(((prices[rows + 1 :] - prices[rows]) / np.arange(1, len(prices) - rows)).min())


def worth_expanding(cycle: Cycle, tree: DraftTree, ctx: Context, row: float) -> Nodes:
    """Unexpanded nodes whose children, if all goes well, earn more than their rows and their share of the pass."""
    open_nodes = tree.depth.numpy() < ctx.room - 1
    open_nodes[cycle.expanded] = False
    nodes = np.flatnonzero(open_nodes)
    nodes = nodes[np.argsort(-cycle.reach[nodes], kind="stable")][:WIDEST]
    if not len(nodes):
        return nodes
    wider = _price(ctx, ctx.costs.draft(WIDEST) - ctx.costs.draft(1)) / (WIDEST - 1)
    good = ctx.calibrator.outlook(tree.depth.numpy()[nodes], cycle.chance[nodes]).good
    earned = np.maximum(cycle.reach[nodes][:, None] * good - row, 0).sum(1)
    worth: Nodes = nodes[earned > wider]
    return worth


def foreseen_profit(cycle: Cycle, chosen: Nodes, tree: DraftTree, ctx: Context, prices: Floats, least: float) -> float:
    """The profit expected of a pass over the chosen nodes, or of a few more; stops looking once it exceeds `least`.

    What the first node's children turn out to be decides whether one goes on, so the good and the bad case are weighed
    apart; beyond that the mean serves.
    """
    depths, reach = tree.depth.numpy()[chosen], cycle.reach[chosen][:, None]
    fee, outlook = _price(ctx, ctx.costs.draft(len(chosen))), ctx.calibrator.outlook(depths, cycle.chance[chosen])
    chance = outlook.mean  # [width, CHILDREN]
    profits = []
    for case in (outlook.bad[0], outlook.good[0]):
        chance[0] = case
        pool = np.append(cycle.values, chance * reach)
        profits.append(best_profit(-np.sort(-pool), prices)[0])
    bad, often, depth = profits[0], float(outlook.often[0]), int(depths.max()) + 1
    most, level = often * profits[1] + (1 - often) * bad - fee, (chance * reach).ravel()
    for passes in range(2, AHEAD + 1):
        if most > least:
            break
        top = np.argsort(-level)[: max(len(chosen), 2)]
        chance = ctx.calibrator.outlook(np.full(len(top), depth), chance.ravel()[top]).mean
        level, depth = (level[top][:, None] * chance).ravel(), depth + 1
        pool = np.append(pool, level)
        deep = best_profit(-np.sort(-pool), prices)[0] - (passes - 1) * fee
        most = max(most, often * deep + (1 - often) * bad - fee)
    return most


def _price(ctx: Context, seconds: float) -> float:
    """Tokens that could be earned elsewhere in this time."""
    plain = ctx.costs.verify(1, ctx.length) + ctx.costs.overhead
    return float(seconds * ctx.calibrator.gain / plain)
