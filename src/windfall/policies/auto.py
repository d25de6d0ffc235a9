"""The tree that earns most per second, by this machine's measured costs and calibrated acceptance. See docs/auto.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.tree import MAX_VERIFY_ROWS, DraftTree
from windfall.core.types import Grow, Step
from windfall.costs.acceptance import FORECAST_CHILDREN, MAX_UNASKED_PASSES, Calibrator
from windfall.costs.curves import Costs
from windfall.costs.online import OnlineCosts
from windfall.policies import cheap_rows
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Opening, Plan, TreeView

AHEAD = 4  # further passes looked ahead
WIDEST = 32  # nodes expanded in one pass at the most
TRIAL = 3  # rows to begin with; one more for every three judged nodes
LATELY = 16  # cycles, about, over which the time for deciding is averaged
CURIOSITY = 0.01  # share of the time that may go into drafts that promise nothing
HOPE = 0.03  # rows that would pay at this share of their price are worth a look


@dataclass
class Auto(TreePolicy):
    """Maximises (1 + Σ acceptance) / (draft passes + verify(rows) + overhead) over time; nothing to tune.

    After each draft pass it asks whether another would pay, and in the end how many rows to verify: none is plain
    decoding. When drafting does not pay it stops, spending no more than a hundredth of the time on looking whether it
    pays again.
    """

    uses_costs: ClassVar[bool] = True

    nodes: int = option(
        96,
        "rows of a verify pass at the most, the root counted: memory's limit, not taste's",
        low=1,
        high=MAX_VERIFY_ROWS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._plain_seconds = 0.0  # decoded without drafting since the last look
        self._thinking = 0.0  # seconds that deciding has lately taken in a cycle with a draft
        self._cycle: Cycle | None = None
        self._curves: dict[int, list[float]] = {}
        self._costs: Costs | None = None  # that these are of
        self._flat = False  # whether this cycle follows the plan, because rows are cheap
        self._ctx: Context | None = None
        self._lessons = cheap_rows.Lessons()

    def plan(self) -> Plan:
        """The tree where rows are cheap; elsewhere `grow` and `select` weigh every row."""
        return Plan(
            passes=cheap_rows.PASSES,
            width=cheap_rows.WIDTH,
            k=FORECAST_CHILDREN,
            rows=min(self.nodes, cheap_rows.ROWS[-1]),
            order="best",
            calibrated=True,
            prices=cheap_rows.prices,
            suits=cheap_rows.suits,
            watches=("summary",),
            decide=self.decide,
            opening=self._opening,
            openings=range(1, MAX_UNASKED_PASSES + 1),
            lookahead=True,
            sizes={min(size, self.nodes) for size in cheap_rows.ROWS},
        )

    def _opening(self, ctx: Context) -> Opening:
        return Opening(ctx.calibrator.min_draft_passes, self.nodes)

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        """Whether the pass after the next is worth its price, and how many rows are worth theirs."""
        (fee, price), found = cheap_rows.prices(ctx), view.summary(level)
        before = view.summary(level - 1).gain + fee if level > 1 else cheap_rows.first(ctx.calibrator, price)
        worth = cheap_rows.rows(int(found.worth), level + 1, cheap_rows.sizes(ctx))
        pays = cheap_rows.pays(found.gain + fee, before, fee)
        return Decision(level + 1 < cheap_rows.PASSES and pays, min(worth, self.nodes))

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        if len(tree) == 1:
            self._ctx, self._flat = None, False
            if self._looks_at_plain(ctx):
                return None
            self._flat = cheap_rows.suits(ctx)
        if self._flat:
            return super().grow(tree, ctx)
        cycle = self._now(ctx)
        if ctx.room < 2:
            return None
        if cycle.expanded and len(tree) == len(cycle.reach):  # the last pass brought nothing
            cycle.learn(tree, ctx.calibrator)
            return None
        cycle.learn(tree, ctx.calibrator)
        chosen = self._next_pass(cycle, ctx)
        if chosen is None:
            return None
        cycle.expand(chosen)
        return Grow(torch.tensor(chosen), k=FORECAST_CHILDREN)

    def start_cycle(self, ctx: Context) -> None:
        self._ctx = ctx

    def observe(self, step: Step) -> None:
        if self._ctx is not None:
            self._lessons.learn(step, self._ctx)
        elif step.draft_passes and not step.recorded:
            self._thinking += (step.seconds.policy - self._thinking) / LATELY

    def _next_pass(self, cycle: Cycle, ctx: Context) -> list[int] | None:
        """The nodes of another draft pass, if it pays, or costs next to nothing."""
        if not cycle.expanded and cycle.fee(1) < CURIOSITY:
            return [0]
        profit, rows = best_profit(cycle.values, cycle.prices)
        chosen = worth_expanding(cycle, ctx, marginal(cycle.prices, rows))
        if chosen and cycle.fee(len(chosen)) < CURIOSITY:  # as cheap to look as to think about it
            return chosen
        if chosen and foreseen_profit(cycle, chosen, ctx, profit) > profit:
            return chosen
        if cycle.expanded:
            return None
        if chosen and self._plain_seconds * CURIOSITY >= cycle.seconds(1):
            self._plain_seconds = 0.0  # just curious
            return chosen
        return [0] if self._doubts(cycle, ctx.online_costs) else None

    def _looks_at_plain(self, ctx: Context) -> bool:
        """Whether to decode plainly, because all is measured by that and no cycle has lately shown what it takes."""
        if ctx.online_costs is None or ctx.online_costs.next_stale_size(0) != 1:
            return False
        return ctx.online_costs.try_spend((ctx.calibrator.speedup - 1) * self._seconds(ctx)[0])

    def _doubts(self, cycle: Cycle, online_costs: OnlineCosts | None) -> bool:
        """Whether to draft because no cycle has shown yet that it does not pay."""
        if online_costs is None or (online_costs.knows_draft_costs and online_costs.next_stale_size(1) != 2):
            return False
        return online_costs.try_spend(cycle.seconds(1))

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        if self._flat:
            return super().select(tree, ctx)
        cycle, self._cycle = self._now(ctx), None
        cycle.learn(tree, ctx.calibrator)
        seconds, values = self._seconds(ctx), cycle.values
        rows = best_profit(values, cycle.prices)[1] if len(tree) > 1 else 0
        ctx.calibrator.update_speedup(1 + sum(values[:rows]), seconds[rows] + cycle.spent, seconds[0])
        if ctx.online_costs is not None:
            rows = more_rows(rows, cycle, ctx.online_costs)
        if not rows:
            ctx.calibrator.drift_to_prior()
            self._plain_seconds += seconds[0]
            return torch.zeros(1, dtype=torch.long)
        return torch.tensor(cycle.best(rows + 1))

    def _now(self, ctx: Context) -> Cycle:
        """This cycle; a new one begins by pricing time: what could be earned in it elsewhere, at the present pace.

        Rows are priced only as far as the calibrator has earned trust for: a new drafter is tried with few.
        """
        if self._cycle is None:
            seconds, trusted = self._seconds(ctx), TRIAL + ctx.calibrator.observed // TRIAL
            rate = ctx.calibrator.speedup / seconds[0]
            self._cycle = Cycle([each * rate for each in seconds[:trusted]], rate, ctx.costs, self._thinking)
        return self._cycle

    def _seconds(self, ctx: Context) -> list[float]:
        """Of a cycle's target pass over 1, 2, … rows at about this length."""
        if self._costs is not ctx.costs:
            self._costs, self._curves = ctx.costs, {}
        place = ctx.length // 128
        if place not in self._curves:
            curve = ctx.costs.verify_curve(self.nodes, ctx.length)
            self._curves[place] = [seconds + ctx.costs.overhead for seconds in curve]
        return self._curves[place]


class Cycle:
    """What time costs in this cycle, and what is known about the nodes drafted in it.

    Lists, not arrays: there are a few dozen nodes at the most, and this runs between passes of the models.
    """

    def __init__(self, prices: list[float], rate: float, costs: Costs, thinking: float = 0.0) -> None:
        self.prices = prices  # of verifying 1, 2, … rows, in tokens
        self.rate, self._costs = rate, costs  # tokens that could be earned elsewhere in a second
        self._first = costs.opening + thinking  # seconds that the first pass of a cycle takes besides
        self.chance = [1.0]  # of each node to be accepted if its parent is
        self.reach = [1.0]  # of each node to be accepted
        self.depth = [0]
        self.values: list[float] = []  # of the drafted nodes' reach, best first
        self.expanded: set[int] = set()
        self.spent = 0.0  # seconds of drafting
        self._fresh: list[int] = []  # expanded in the last pass

    def seconds(self, width: int) -> float:
        """What a pass over this many nodes would take now."""
        return self._costs.draft(width) + (0.0 if self.expanded else self._first)

    def fee(self, width: int) -> float:
        """The same in tokens."""
        return self.seconds(width) * self.rate

    def later_fee(self, width: int) -> float:
        """Of a pass that is not the cycle's first."""
        return self._costs.draft(width) * self.rate

    def expand(self, nodes: list[int]) -> None:
        self.spent += self.seconds(len(nodes))
        self._fresh = nodes
        self.expanded.update(nodes)

    def best(self, count: int) -> list[int]:
        """The nodes most likely to be accepted, ascending; ties go to the shallower, then to the earlier node."""
        order = sorted(range(len(self.reach)), key=lambda node: (-self.reach[node], self.depth[node]))
        return sorted(order[:count])

    def learn(self, tree: DraftTree, calibrator: Calibrator) -> None:
        """Take in the nodes drafted last, and teach the calibrator what children such nodes turn out to have."""
        known = len(self.reach)
        parents, children = tree.parents[known:].tolist(), {node: list[float]() for node in self._fresh}
        if parents:
            chances, families = calibrator.accept(tree, known), dict.fromkeys(parents, 0.0)
            for parent, chance in zip(parents, chances, strict=True):
                families[parent] += chance
            for parent, chance in zip(parents, chances, strict=True):
                chance /= max(families[parent], 1.0)  # one sibling at the most is accepted
                self.chance.append(chance)
                self.reach.append(self.reach[parent] * chance)
                children.setdefault(parent, []).append(chance)
            self.depth += tree.depth[known:].tolist()
            self.values = sorted(self.reach[1:], reverse=True)
        for node in self._fresh:
            calibrator.update_forecast(self.depth[node], self.chance[node], children[node])
        self._fresh = []


def best_profit(values: Sequence[float], prices: Sequence[float]) -> tuple[float, int]:
    """The most that verifying some of these nodes earns, in tokens net of time, and how many of them that takes."""
    most, rows, earned = -prices[0], 0, 0.0
    for count, (value, price) in enumerate(zip(values, prices[1:], strict=False), 1):
        earned += value
        if earned - price > most:
            most, rows = earned - price, count
    return most, rows


def more_rows(rows: int, cycle: Cycle, online_costs: OnlineCosts) -> int:
    """The same, or more now and then, where no cycle has shown that they cost what they are said to."""
    size = online_costs.next_stale_size(rows + 1)
    if size is None or size > min(len(cycle.prices), len(cycle.values) + 1, 2 * rows + 2):
        return rows
    dearer = cycle.prices[size - 1] - cycle.prices[rows]
    worth = sum(cycle.values[rows : size - 1]) > HOPE * dearer
    return size - 1 if worth and online_costs.try_spend(dearer / cycle.rate) else rows


def marginal(prices: Sequence[float], rows: int) -> float:
    """The price of one more row, on the way to the best larger pass."""
    base = prices[rows] if rows < len(prices) else 0.0
    return min(((price - base) / more for more, price in enumerate(prices[rows + 1 :], 1)), default=float("inf"))


def worth_expanding(cycle: Cycle, ctx: Context, row: float) -> list[int]:
    """Unexpanded nodes whose children, if all goes well, earn more than their rows and their share of the pass."""
    deepest, reach = ctx.room - 1, cycle.reach
    nodes = [n for n, depth in enumerate(cycle.depth) if depth < deepest and n not in cycle.expanded]
    nodes = sorted(nodes, key=reach.__getitem__, reverse=True)[:WIDEST]
    wider = (cycle.later_fee(WIDEST) - cycle.later_fee(1)) / (WIDEST - 1)
    worth = []
    for node in nodes:
        good, own = ctx.calibrator.forecast(cycle.depth[node], cycle.chance[node]).good, reach[node]
        if sum(own * chance - row for chance in good if own * chance > row) > wider:
            worth.append(node)
    return worth


def foreseen_profit(cycle: Cycle, chosen: list[int], ctx: Context, least: float) -> float:
    """The profit expected of a pass over the chosen nodes, or of a few more; stops looking once it exceeds `least`.

    What the first node's children turn out to be decides whether one goes on, so the good and the bad case are weighed
    apart; beyond that the mean serves.
    """
    fee, first, prices = cycle.later_fee(len(chosen)), cycle.fee(len(chosen)), cycle.prices
    forecast, depth = ctx.calibrator.forecast, max(cycle.depth[node] for node in chosen) + 1
    leader = forecast(cycle.depth[chosen[0]], cycle.chance[chosen[0]])
    others = _children((cycle.reach[n], forecast(cycle.depth[n], cycle.chance[n]).mean) for n in chosen[1:])
    own = cycle.reach[chosen[0]]

    def profit(children: list[tuple[float, float]]) -> float:
        return best_profit(sorted([*cycle.values, *(reach for reach, _ in children)], reverse=True), prices)[0]

    bad, pool = profit(_children([(own, leader.bad)]) + others), _children([(own, leader.good)]) + others
    good_share = leader.good_share
    most, level = good_share * profit(pool) + (1 - good_share) * bad - first, pool
    for passes in range(2, AHEAD + 1):
        if most > least:
            break
        top = sorted(level, reverse=True)[: max(len(chosen), 2)]
        level, depth = _children((reach, forecast(depth, chance).mean) for reach, chance in top), depth + 1
        pool = pool + level
        deep = profit(pool) - (passes - 1) * fee
        most = max(most, good_share * deep + (1 - good_share) * bad - first)
    return most


def _children(families: Iterable[tuple[float, list[float]]]) -> list[tuple[float, float]]:
    """(reach, chance) of all children, from (the parent's reach, the children's chances)."""
    return [(reach * chance, chance) for reach, chances in families for chance in chances]
