"""`auto` against exhaustive searches, on table models under cost curves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from helpers.auto import CURVES, pair
from helpers.simulation import Simulation
from helpers.table import random_table
from windfall import registry
from windfall.core.tree import DraftTree
from windfall.core.types import Split, Step
from windfall.costs.acceptance import Calibrator
from windfall.costs.correction import Correction
from windfall.costs.curves import Costs, Curve
from windfall.engine.host_loop import Growth
from windfall.policies import cheap_rows
from windfall.policies.auto import best_profit, marginal
from windfall.policies.context import Context

WORTHLESS = Costs.simple(0.05, (1, 2, 64), (1.0, 10.0, 20.0))


@pytest.mark.parametrize("seed", range(12))
def test_selection_is_the_best_of_all_subtrees(seed: int) -> None:
    """Against every parent-closed subset of a random tree, under a random cost curve."""
    generator = np.random.default_rng(seed)
    tree = DraftTree.root(0)
    for node in range(1, 10):
        parent = int(generator.integers(0, node))
        rank = int((tree.parents == parent).sum())
        logq = torch.tensor([float(np.log(generator.uniform(0.05, 0.9) * 0.5**rank))])
        tree = tree.extend(torch.tensor([parent]), torch.tensor([node]), logq, torch.tensor([rank]))
    rows = [1, 2, 4, 8, 16]
    costs = Costs.simple(0.1, rows, np.cumsum(generator.uniform(0.05, 1.0, len(rows))) + 0.5, 0.1)
    trusted = Calibrator()
    trusted.observed = 1000
    context = Context(32, 64, 0.0, costs, trusted)
    policy = registry.policy("auto", nodes=16)
    keep = policy.select(tree, context)
    chance = Calibrator().accept(tree)
    sums = np.zeros(len(tree))
    np.add.at(sums, tree.parents[1:].numpy(), chance)
    reach = np.ones(len(tree))
    for node in range(1, len(tree)):
        parent = int(tree.parents[node])
        reach[node] = reach[parent] * chance[node - 1] / max(1.0, sums[parent])

    def profit(nodes: tuple[int, ...]) -> float:
        pace = 1.0 / (costs.verify(1, 32) + costs.overhead)
        return float(reach[list(nodes)].sum()) - pace * (costs.verify(len(nodes), 32) + costs.overhead)

    closed = [
        (0, *nodes)
        for size in range(len(tree))
        for nodes in itertools.combinations(range(1, len(tree)), size)
        if all(int(tree.parents[n]) in (0, *nodes) for n in nodes)
    ]
    assert profit(tuple(keep.tolist())) == pytest.approx(max(map(profit, closed)), abs=1e-9)


@pytest.mark.parametrize("sharpness", [1.5, 3.0])
@pytest.mark.parametrize("curve", CURVES)
def test_as_fast_as_the_best_fixed_tree(curve: str, sharpness: float) -> None:
    """Within 4% of the best depth, width and size that a search finds for this drafter and this machine."""
    costs, (target, draft) = CURVES[curve], pair(sharpness)
    fixed = [
        registry.policy("beam", depth=depth, k=k, nodes=nodes)
        for depth, k in ((1, 1), (1, 4), (1, 8), (2, 1), (2, 8), (3, 4), (4, 2), (4, 8), (6, 8))
        for nodes in sorted({2, 6, 16, min(64, 1 + k * k * depth)})
    ]
    fixed.sort(key=lambda policy: Simulation(target, draft, costs).throughput(policy, 12), reverse=True)
    found = max(Simulation(target, draft, costs).throughput(policy, 60) for policy in fixed[:8])
    plain = 1 / (costs.verify(1, 32) + costs.overhead)
    ours = Simulation(target, draft, costs).throughput(registry.policy("auto"), 300, warm_up=150)
    assert ours > 0.98 * max(plain, found * 0.98)  # the search keeps its luckiest run of 60 cycles


def test_a_useless_drafter_costs_at_most_three_percent() -> None:
    """Rows are cheap, but nothing that is drafted is ever accepted."""
    target = torch.zeros(24, 24).scatter_(1, (torch.arange(24)[:, None] + 1) % 24, 1.0)
    draft = torch.full((24, 24), 1 / 23).scatter_(1, (torch.arange(24)[:, None] + 1) % 24, 0.0)
    costs = CURVES["flat, cheap head"]
    ours = Simulation(target, draft, costs).throughput(registry.policy("auto"), 400, warm_up=400)
    assert ours > 0.97 / (costs.verify(1, 32) + costs.overhead)


@pytest.mark.parametrize("gain", [1.0, 12.0])
def test_a_high_speed_up_does_not_end_drafting(gain: float) -> None:
    """At a high speed-up a draft pass costs more than its first node earns, which must not stop drafting."""
    context = Context(32, 64, 0.0, CURVES["flat, cheap head"], Calibrator())
    context.calibrator.speedup = gain
    assert cheap_rows.suits(context)


STAIRS = (1.0, 1.03, 1.09, 1.12, 1.26, 1.3, 1.41, 1.42)  # of passes up to 64 rows, as graphs of a small model take


@pytest.mark.parametrize(("last", "most"), [(1.45, 96), (1.98, 64), (3.5, 64)])
def test_sizes_after_a_large_step_in_cost_are_not_used(last: float, most: int) -> None:
    curve = Curve(cheap_rows.ROWS, (*STAIRS, last), stepped=True)
    context = Context(32, 64, 0.0, Costs(Curve((1,), (0.1,)), ((0, curve),)), Calibrator())
    assert cheap_rows.suits(context) and cheap_rows.sizes(context)[-1] == most
    secant = ((last if most == 96 else 1.42) - 1) / (most - 1)
    assert cheap_rows.prices(context)[1] == pytest.approx(secant * context.calibrator.speedup)
    assert cheap_rows.rows(500, 4, cheap_rows.sizes(context)) == most
    smooth = Costs(Curve((1,), (0.1,)), ((0, Curve(cheap_rows.ROWS, (*STAIRS, last))),))
    assert cheap_rows.rows_are_cheap(smooth, 32) == (last < 2)


def test_sizes_that_cost_as_much_as_the_next_are_not_used() -> None:
    curve = Curve(cheap_rows.ROWS, (*STAIRS, 3.5), stepped=True)
    context = Context(32, 64, 0.0, Costs(Curve((1,), (0.1,)), ((0, curve),)), Calibrator())
    assert cheap_rows.sizes(context) == (1, 4, 8, 16, 24, 32, 64)
    assert cheap_rows.rows(40, 9, cheap_rows.sizes(context)) == 64
    even = Context(32, 64, 0.0, Costs(Curve((1,), (0.1,)), ((0, Curve((1,), (1.0,))),)), Calibrator())
    assert cheap_rows.sizes(even) == (cheap_rows.ROWS[-1],) and cheap_rows.rows(0, 1, cheap_rows.sizes(even)) == 1


def test_drafting_stops_if_extra_rows_are_too_expensive() -> None:
    """If a second row costs ten plain steps, only one row is verified and drafting takes under 2% of the time."""
    simulation, policy = Simulation(*pair(3.0), WORTHLESS), registry.policy("auto")
    steps = [simulation.cycle(policy)[2] for _ in range(200)]
    assert all(len(step.tree) == 1 for step in steps)
    drafting = sum(step.draft_passes for step in steps[50:]) * WORTHLESS.draft(1)
    assert drafting < 0.02 * 150


def test_drafting_resumes_when_the_drafter_is_right_again() -> None:
    simulation, policy = Simulation(*pair(3.0), CURVES["steps"]), registry.policy("auto")
    good = simulation.target
    simulation.target = torch.roll(good, 7, 1)  # the drafter is wrong about everything
    for _ in range(150):
        simulation.cycle(policy)
    rows = [len(simulation.cycle(policy)[2].tree) for _ in range(50)]
    assert sum(rows) / len(rows) < 1.5
    simulation.target = good
    for _ in range(400):
        simulation.cycle(policy)
    rows = [len(simulation.cycle(policy)[2].tree) for _ in range(50)]
    assert sum(rows) / len(rows) > 3


def test_profit_and_margin_by_hand() -> None:
    values, prices = np.array([0.9, 0.5, 0.1]), np.array([1.0, 1.2, 1.4, 2.4])
    assert best_profit(values, prices) == (pytest.approx(0.0), 2)
    assert best_profit(values, np.array([1.0, 3.0, 4.0, 5.0])) == (pytest.approx(-1.0), 0)
    assert marginal(np.array([1.0, 3.0, 3.1]), 0) == pytest.approx(1.05)
    assert marginal(prices, 3) == float("inf")


def children(tree: DraftTree, parent: int, *chances: float) -> DraftTree:
    count = len(chances)
    return tree.extend(
        torch.full((count,), parent), torch.arange(count), torch.tensor(chances).log(), torch.arange(count)
    )


def test_near_the_end_the_nodes_of_a_single_pass_are_verified() -> None:
    """Decisions use the pass before the last; with room for only one pass, the nodes of that pass are verified."""
    policy, context = registry.policy("auto"), Context(32, 2, 0.0, CURVES["flat, cheap head"], Calibrator())
    growth, tree = Growth(policy, context), DraftTree.root(0)
    assert growth.next(tree) is not None
    tree = children(tree, 0, 0.6, 0.2, 0.1)
    assert growth.next(tree) is None and growth.passes == 1
    assert policy.select(tree, context).tolist() == [0, 1, 2, 3]


def test_the_speed_up_is_updated_at_the_end_of_a_short_text() -> None:
    context, root = Context(32, 64, 0.0, CURVES["flat, cheap head"], Calibrator()), DraftTree.root(0)
    stats, path = cheap_rows.CycleStats(), torch.zeros(1, dtype=torch.long)
    for finish in (None, "stop"):
        assert context.calibrator.speedup == 1
        stats.learn(Step((1, 2, 3, 4), "", root, path, root, path, 1, Split(verify=1.5), finish), context)
    assert context.calibrator.speedup > 1


@pytest.mark.parametrize("recorded", [True, False])
def test_cycles_that_captured_graphs_do_not_change_the_speed_up(recorded: bool) -> None:
    context, root = Context(32, 64, 0.0, CURVES["flat, cheap head"], Calibrator()), DraftTree.root(0)
    stats, path, tokens = cheap_rows.CycleStats(), torch.zeros(1, dtype=torch.long), (1, 2, 3, 4)
    context.calibrator.speedup = 2.0
    stats.learn(Step(tokens, "", root, path, root, path, 1, Split(verify=90.0), None, recorded), context)
    stats.learn(Step(tokens, "", root, path, root, path, 1, Split(verify=1.5), "stop"), context)
    assert (context.calibrator.speedup > 2) == recorded


def test_forecasts_are_updated_at_the_normalised_probability() -> None:
    """At most one sibling can be accepted, so two siblings of probability 0.9 each are counted at less."""
    calibrator, tree = Calibrator(), children(children(DraftTree.root(0), 0, 0.9, 0.9), 1, 0.9)
    before = [calibrator.forecast(1, chance) for chance in (0.5, 0.9)]
    cheap_rows.update_forecasts(tree, calibrator, 0)
    assert [calibrator.forecast(1, chance) == own for chance, own in zip((0.5, 0.9), before, strict=True)] == [
        False,
        True,
    ]


def test_a_confident_drafter_that_is_wrong_in_one_text_gets_fewer_rows() -> None:
    """The calibrator has seen many texts that the drafter could follow, and changes too slowly for one text."""
    draft = random_table(24, 3, 4.0)
    wrong = draft[torch.randperm(24, generator=torch.Generator().manual_seed(0))]
    rows = {}
    for corrected in (False, True):
        simulation = Simulation(draft, draft, CURVES["flat, cheap head"])
        simulation.throughput(registry.policy("auto"), 300)
        simulation.target, simulation.correction = wrong, Correction() if corrected else None
        policy = registry.policy("auto")
        rows[corrected] = sum(len(simulation.cycle(policy)[2].tree) for _ in range(60))
    assert rows[True] < 0.7 * rows[False], rows


def test_trials_become_rarer_if_they_take_longer_than_a_usual_pass() -> None:
    """The drafter first takes in the tokens since its last pass. A single slow pass must not end drafting for good."""
    target = torch.zeros(24, 24).scatter_(1, (torch.arange(24)[:, None] + 1) % 24, 1.0)
    draft = torch.full((24, 24), 1 / 23).scatter_(1, (torch.arange(24)[:, None] + 1) % 24, 0.0)
    passes = {}
    for extra in (0.0, 0.2, 9.0):
        simulation, policy = Simulation(target, draft, Costs.simple(0.1, (1, 64), (1.0, 30.0))), registry.policy("auto")
        simulation.first_pass_extra = extra
        later = [simulation.cycle(policy)[2].draft_passes for _ in range(800)][200:]
        passes[extra] = sum(later)
    assert passes[0.0] > 2 * passes[0.2] and passes[0.2] > passes[9.0] > 5, passes
