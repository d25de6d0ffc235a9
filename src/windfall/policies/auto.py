"""The tree with the most tokens per second by measured costs and calibrated acceptance. See docs/auto.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.core.tree import MAX_VERIFY_ROWS, DraftTree
from windfall.core.types import Grow, Step
from windfall.costs.acceptance import FORECAST_CHILDREN, MAX_UNASKED_PASSES
from windfall.costs.curves import Costs
from windfall.costs.online import OnlineCosts
from windfall.policies import cheap_rows
from windfall.policies.auto_budget import AutoBudget
from windfall.policies.base import TreePolicy
from windfall.policies.budget import Budget
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Opening, Plan, TreeView

LOOK_AHEAD_PASSES = 4  # draft passes whose profit is estimated in advance
MAX_WIDTH = 32  # nodes expanded in one pass
FIRST_ROWS = 3  # rows that a new drafter may fill; one more for every three verified nodes
RECENT_CYCLES = 16  # over which the time for decisions is averaged
EXPLORATION_SHARE = 0.01  # share of the time that may be spent on drafts that should not pay
MAX_TRIAL_PASSES = 4  # usual first passes that a trial may be taken to cost
MIN_EXPLORED_VALUE = 0.03  # rows worth at least this share of their price may be measured


@dataclass
class Auto(TreePolicy):
    """The tree with the most expected tokens per second on this machine, plain decoding included; needs no settings.

    It maximises (1 + Σ acceptance) / (seconds of draft passes + verify(rows) + overhead).

    After each draft pass it decides whether another pass pays, and in the end how many drafted nodes to verify; none
    means plain decoding. Where drafting does not pay it stops, and spends at most a hundredth of the time on checking
    whether it pays again.
    """

    uses_costs: ClassVar[bool] = True

    nodes: int = option(
        96,
        "maximum rows of a verify pass, the root included; limits memory, needs no tuning",
        low=1,
        high=MAX_VERIFY_ROWS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._plain_seconds = 0.0  # of plain decoding since drafting was last tried
        self._trial = False  # whether the first draft pass of this cycle should not pay
        self._trial_seconds = 0.0  # of the last such pass: the drafter first takes in the tokens since its last pass
        self._decision_seconds = 0.0  # recent mean over cycles that drafted
        self._cycle: Cycle | None = None
        self._curves: dict[int, list[float]] = {}
        self._costs: Costs | None = None  # the costs that the curves belong to
        self._follows_plan = False  # in this cycle, because rows are cheap
        self._ctx: Context | None = None
        self._stats = cheap_rows.CycleStats()

    def plan(self) -> Plan:
        """The tree where rows are cheap; elsewhere `grow` and `select` decide about every row."""
        return Plan(
            passes=cheap_rows.MAX_PASSES,
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

    def budget(self) -> Budget:
        return AutoBudget(self.nodes)

    def _opening(self, ctx: Context) -> Opening:
        return Opening(ctx.calibrator.min_draft_passes, self.nodes)

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        """Whether the pass after the next is worth its price, and how many rows are worth verifying."""
        (fee, price), found = cheap_rows.prices(ctx), view.summary(level)
        before = view.summary(level - 1).gain + fee if level > 1 else cheap_rows.first(ctx.calibrator, price)
        worth = cheap_rows.rows(int(found.worth), level + 1, cheap_rows.sizes(ctx))
        pays = cheap_rows.pays(found.gain + fee, before, fee)
        return Decision(level + 1 < cheap_rows.MAX_PASSES and pays, min(worth, self.nodes))

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        if len(tree) == 1:
            self._ctx, self._follows_plan = None, False
            if self._measures_plain(ctx):
                return None
            self._follows_plan = cheap_rows.suits(ctx)
        if self._follows_plan:
            return super().grow(tree, ctx)
        cycle = self._current_cycle(ctx)
        if ctx.room < 2:
            return None
        if cycle.expanded and len(tree) == len(cycle.reach):  # the last pass brought nothing
            cycle.learn(tree, ctx)
            return None
        cycle.learn(tree, ctx)
        chosen = self._next_pass(cycle, ctx)
        if chosen is None:
            return None
        cycle.expand(chosen)
        return Grow(torch.tensor(chosen), k=FORECAST_CHILDREN)

    def start_cycle(self, ctx: Context) -> None:
        self._ctx = ctx if ctx.requests == 1 else None  # the seconds of a shared round say nothing about one text

    def observe(self, step: Step) -> None:
        if self._trial and step.draft_passes == 1 and not step.recorded:
            self._trial_seconds = step.seconds.draft
        self._trial = False
        if self._ctx is not None:
            self._stats.learn(step, self._ctx)
        elif step.draft_passes and not step.recorded:
            self._decision_seconds += (step.seconds.policy - self._decision_seconds) / RECENT_CYCLES

    def _next_pass(self, cycle: Cycle, ctx: Context) -> list[int] | None:
        """The nodes of another draft pass if it pays or costs very little."""
        if not cycle.expanded and cycle.fee(1) < EXPLORATION_SHARE:
            return [0]
        profit, rows = best_profit(cycle.values, cycle.prices)
        chosen = worth_expanding(cycle, ctx, marginal(cycle.prices, rows))
        if (
            chosen and cycle.fee(len(chosen)) < EXPLORATION_SHARE
        ):  # estimating its profit would cost as much as the pass
            return chosen
        if chosen and foreseen_profit(cycle, chosen, ctx, profit) > profit:
            return chosen
        if cycle.expanded:
            return None
        if chosen and self._plain_seconds * EXPLORATION_SHARE >= self._trial_price(cycle):
            self._plain_seconds, self._trial = 0.0, True
            return chosen
        self._trial = self._tries_drafting(cycle, ctx.online_costs)
        return [0] if self._trial else None

    def _trial_price(self, cycle: Cycle) -> float:
        """Seconds of a draft pass after cycles without one."""
        usual = cycle.seconds(1)
        return min(max(usual, self._trial_seconds), MAX_TRIAL_PASSES * usual)

    def _measures_plain(self, ctx: Context) -> bool:
        """Whether to decode this cycle plainly, to measure the time that every speed-up is compared with."""
        if ctx.online_costs is None or ctx.online_costs.next_stale_size(0) != 1:
            return False
        return ctx.online_costs.try_spend((ctx.calibrator.speedup - 1) * self._seconds(ctx)[0])

    def _tries_drafting(self, cycle: Cycle, online_costs: OnlineCosts | None) -> bool:
        """Whether to draft although it should not pay, because its cost has not been measured recently."""
        if online_costs is None or (online_costs.knows_draft_costs and online_costs.next_stale_size(1) != 2):
            return False
        return online_costs.try_spend(self._trial_price(cycle))

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        if self._follows_plan:
            return super().select(tree, ctx)
        cycle, self._cycle = self._current_cycle(ctx), None
        cycle.learn(tree, ctx)
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

    def _current_cycle(self, ctx: Context) -> Cycle:
        """The current cycle. A new one first computes the price of time: tokens per second at the recent speed.

        A new drafter may fill only a few rows; the number grows with the nodes that were verified.
        """
        if self._cycle is None:
            seconds, trusted = self._seconds(ctx), FIRST_ROWS + ctx.calibrator.observed // FIRST_ROWS
            rate = ctx.calibrator.speedup / seconds[0]
            self._cycle = Cycle([each * rate for each in seconds[:trusted]], rate, ctx.costs, self._decision_seconds)
        return self._cycle

    def _seconds(self, ctx: Context) -> list[float]:
        """Seconds of a verify pass over 1, 2, … rows at about this length, with the overhead of a cycle."""
        if self._costs is not ctx.costs:
            self._costs, self._curves = ctx.costs, {}
        place = ctx.length // 128
        if place not in self._curves:
            curve = ctx.costs.verify_curve(self.nodes, ctx.length)
            self._curves[place] = [seconds + ctx.costs.overhead for seconds in curve]
        return self._curves[place]


class Cycle:
    """The price of time in this cycle, and the chances of the nodes drafted in it.

    It uses lists because there are a few dozen nodes at most, for which lists are quicker than arrays.
    """

    def __init__(self, prices: list[float], rate: float, costs: Costs, decision_seconds: float = 0.0) -> None:
        self.prices = prices  # of verifying 1, 2, … rows, in tokens
        self.rate, self._costs = rate, costs  # tokens per second at the recent speed
        self._first = costs.opening + decision_seconds  # additional seconds of the first pass of a cycle
        self.chance = [1.0]  # of each node to be accepted if its parent is
        self.reach = [1.0]  # of each node to be accepted
        self.depth = [0]
        self.values: list[float] = []  # of the drafted nodes' reach, best first
        self.expanded: set[int] = set()
        self.spent = 0.0  # seconds of drafting
        self._fresh: list[int] = []  # expanded in the last pass

    def seconds(self, width: int) -> float:
        """Seconds of a draft pass over this many nodes, if it came next."""
        return self._costs.draft(width) + (0.0 if self.expanded else self._first)

    def fee(self, width: int) -> float:
        """The same in tokens."""
        return self.seconds(width) * self.rate

    def later_fee(self, width: int) -> float:
        """The price in tokens of a pass that is not the first of the cycle."""
        return self._costs.draft(width) * self.rate

    def expand(self, nodes: list[int]) -> None:
        self.spent += self.seconds(len(nodes))
        self._fresh = nodes
        self.expanded.update(nodes)

    def best(self, count: int) -> list[int]:
        """The nodes most likely to be accepted, ascending; ties go to the shallower, then to the earlier node."""
        order = sorted(range(len(self.reach)), key=lambda node: (-self.reach[node], self.depth[node]))
        return sorted(order[:count])

    def learn(self, tree: DraftTree, ctx: Context) -> None:
        """Add the newest nodes, and teach the calibrator which children their parents had."""
        known, calibrator = len(self.reach), ctx.calibrator
        parents, children = tree.parents[known:].tolist(), {node: list[float]() for node in self._fresh}
        if parents:
            chances, families = calibrator.accept(tree, known, ctx.shift), dict.fromkeys(parents, 0.0)
            for parent, chance in zip(parents, chances, strict=True):
                families[parent] += chance
            for parent, chance in zip(parents, chances, strict=True):
                chance /= max(families[parent], 1.0)  # at most one sibling is accepted
                self.chance.append(chance)
                self.reach.append(self.reach[parent] * chance)
                children.setdefault(parent, []).append(chance)
            self.depth += tree.depth[known:].tolist()
            self.values = sorted(self.reach[1:], reverse=True)
        for node in self._fresh:
            calibrator.update_forecast(self.depth[node], self.chance[node], children[node])
        self._fresh = []


def best_profit(values: Sequence[float], prices: Sequence[float]) -> tuple[float, int]:
    """The highest profit of verifying the best of these nodes, in tokens less the price of time, and their number."""
    most, rows, earned = -prices[0], 0, 0.0
    for count, (value, price) in enumerate(zip(values, prices[1:], strict=False), 1):
        earned += value
        if earned - price > most:
            most, rows = earned - price, count
    return most, rows


def more_rows(rows: int, cycle: Cycle, online_costs: OnlineCosts) -> int:
    """This number of rows, or sometimes more, to measure a size whose cost has not been measured recently."""
    size = online_costs.next_stale_size(rows + 1)
    if size is None or size > min(len(cycle.prices), len(cycle.values) + 1, 2 * rows + 2):
        return rows
    dearer = cycle.prices[size - 1] - cycle.prices[rows]
    worth = sum(cycle.values[rows : size - 1]) > MIN_EXPLORED_VALUE * dearer
    return size - 1 if worth and online_costs.try_spend(dearer / cycle.rate) else rows


def marginal(prices: Sequence[float], rows: int) -> float:
    """The lowest price per additional row among all larger passes."""
    base = prices[rows] if rows < len(prices) else 0.0
    return min(((price - base) / more for more, price in enumerate(prices[rows + 1 :], 1)), default=float("inf"))


def worth_expanding(cycle: Cycle, ctx: Context, row: float) -> list[int]:
    """Unexpanded nodes whose children, in the good case, earn more than their rows and their part of the pass cost."""
    deepest, reach = ctx.room - 1, cycle.reach
    nodes = [n for n, depth in enumerate(cycle.depth) if depth < deepest and n not in cycle.expanded]
    nodes = sorted(nodes, key=reach.__getitem__, reverse=True)[:MAX_WIDTH]
    wider = (cycle.later_fee(MAX_WIDTH) - cycle.later_fee(1)) / (MAX_WIDTH - 1)
    worth = []
    for node in nodes:
        good, own = ctx.calibrator.forecast(cycle.depth[node], cycle.chance[node]).good, reach[node]
        if sum(own * chance - row for chance in good if own * chance > row) > wider:
            worth.append(node)
    return worth


def foreseen_profit(cycle: Cycle, chosen: list[int], ctx: Context, least: float) -> float:
    """The expected profit of a pass over the chosen nodes and of a few more passes after it.

    The children of the first node decide whether drafting goes on, so its good and bad case are computed separately;
    for all other nodes the mean is used. The estimate ends as soon as it exceeds `least`.
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
    for passes in range(2, LOOK_AHEAD_PASSES + 1):
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
