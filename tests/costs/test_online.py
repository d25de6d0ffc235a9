"""Costs that are corrected while decoding: wrong profiles are corrected, noise changes nothing, given costs stay."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers.auto import CURVES, pair
from helpers.simulation import Simulation
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.costs.curves import Costs, Curve
from windfall.costs.online import INITIAL_PROBE_STEPS, STALE_CYCLES, WARM_UP_CYCLES, OnlineCosts
from windfall.drafters.lm import LMDrafter
from windfall.engine import loading, profiling
from windfall.engine.engine import Engine
from windfall.engine.profiling import Profile
from windfall.model.target import Target

COSTS = Costs(Curve((1, 8), (1.0, 2.0)), ((0, Curve((1, 4, 16, 64), (10.0, 20.0, 30.0, 40.0))),), 1.0, 0.5)
SIZES = (1, 2, 3, 4, 8, 16, 32, 64)


def warm(costs: Costs = COSTS, learns: bool = True) -> OnlineCosts:
    """A online_costs past its first cycles, in which passes took what was measured."""
    online_costs = OnlineCosts(costs, learns)
    for _ in range(WARM_UP_CYCLES + 1):
        online_costs.record_verify(1, 0, costs.verify(1, 0))
    return online_costs


def verify(online_costs: OnlineCosts, rows: int, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        online_costs.record_verify(rows, 0, seconds)


# ---- learning from measured passes


def test_one_faster_pass_lowers_its_cost_and_those_of_other_sizes() -> None:
    online_costs = warm()
    verify(online_costs, 1, 10.0, 8)
    verify(online_costs, 4, 12.0)
    assert online_costs.costs.verify(1, 0) == pytest.approx(10.0)
    assert online_costs.costs.verify(4, 0) == pytest.approx(12.0)
    assert online_costs.costs.verify(64, 0) == pytest.approx(24.0)  # three fifths as well
    assert 10.0 < online_costs.costs.verify(2, 0) < COSTS.verify(2, 0)
    assert online_costs.overestimate == pytest.approx(5 / 3)


@pytest.mark.parametrize("stepped", [False, True], ids=["on a CPU", "in CUDA graphs"])
def test_a_small_error_of_draft_passes_is_noise_except_on_a_device(stepped: bool) -> None:
    verifies = ((0, replace(COSTS.verifies[0][1], stepped=stepped)),)
    online_costs = warm(replace(COSTS, verifies=verifies))
    for _ in range(12):
        verify(online_costs, 1, 10.0)
        online_costs.record_drafts([0, 8, 8], 0.75 * (1.5 + 2 * 2.0))
    assert online_costs.costs.draft(8) == pytest.approx(1.5 if stepped else 2.0)


def test_costs_rise_strictly_with_rows() -> None:
    """Otherwise policies would grow trees without limit."""
    online_costs = warm()
    verify(online_costs, 4, 2.0)
    verify(online_costs, 16, 1.0)
    seconds = online_costs.costs.verifies[0][1].seconds
    assert all(less < more for less, more in itertools.pairwise(seconds)) and online_costs.costs.verify(16, 0) < 10


def test_repeated_slower_passes_raise_the_cost() -> None:
    online_costs = warm()
    verify(online_costs, 4, 200.0, 3)
    assert online_costs.costs.verify(4, 0) == pytest.approx(20.0)
    verify(online_costs, 4, 60.0, 8)
    assert online_costs.costs.verify(4, 0) == pytest.approx(60.0)


def test_single_slow_passes_change_nothing() -> None:
    online_costs = warm()
    for turn in range(60):
        verify(online_costs, 4, 200.0 if turn % 6 == 0 else 20.0)
        online_costs.record_drafts([1], 30.0 if turn % 7 == 0 else 1.0)
    assert online_costs.costs is COSTS


def test_small_changes_of_time_do_not_change_the_costs() -> None:
    """Policies and the GPU runner rebuild their state whenever the costs change."""
    online_costs = warm()
    for turn in range(60):
        verify(online_costs, 4, 20.0 * (1 + 0.05 * (turn % 3 - 1)))
    assert online_costs.costs is COSTS


def test_all_costs_scale_with_a_plain_step_until_draft_passes_are_timed() -> None:
    online_costs = OnlineCosts(COSTS)
    verify(online_costs, 1, 2.0)
    assert online_costs.costs.draft(1) == pytest.approx(0.2) and online_costs.costs.opening == pytest.approx(0.1)
    assert online_costs.costs.overhead == pytest.approx(0.2)
    online_costs.record_drafts([0], 3.0)  # ten times as much, but it may have had the prompt to take in
    assert online_costs.costs.draft(1) == pytest.approx(0.2)
    online_costs.record_drafts([0, 8, 8], 0.11)
    assert online_costs.costs.draft(1) == pytest.approx(0.02) and online_costs.costs.verify(1, 0) == pytest.approx(2.0)


def test_times_marked_at_most_only_lower_the_costs() -> None:
    online_costs = warm()
    for _ in range(20):
        online_costs.record_drafts([0], 9.0, at_most=True)
        online_costs.record_verify(1, 0, 90.0, at_most=True)
    assert online_costs.costs is COSTS and not online_costs.knows_draft_costs
    online_costs.record_drafts([0], 0.5, at_most=True)
    assert online_costs.costs.draft(1) == pytest.approx(1 / 3)


def test_costs_learnt_on_a_busy_machine_are_dropped_when_it_is_free() -> None:
    online_costs = warm()
    for _ in range(20):
        online_costs.record_drafts([1], 12.0)
        verify(online_costs, 1, 30.0)
        verify(online_costs, 4, 200.0)
    assert online_costs.costs.draft(1) == pytest.approx(12.0) and online_costs.next_stale_size(1) == 2
    verify(online_costs, 1, 10.0, 8)
    assert online_costs.costs.draft(1) == pytest.approx(1.0) and online_costs.costs.verify(4, 0) == pytest.approx(20.0)
    assert online_costs.next_stale_size(2) == 3 and not online_costs.knows_draft_costs


def test_stepped_curves_keep_their_sizes() -> None:
    stepped = replace(COSTS, verifies=((0, replace(COSTS.verifies[0][1], stepped=True)),))
    online_costs = warm(stepped)
    verify(online_costs, 3, 5.0)
    assert online_costs.costs.verifies[0][1].sizes == (1, 4, 16, 64) and online_costs.costs.verifies[0][1].stepped


# ---- probing sizes that seem too expensive


def test_sizes_become_stale_and_are_probed_again() -> None:
    online_costs = warm()
    assert online_costs.next_stale_size(1) == 2
    verify(online_costs, 2, 3 * COSTS.verify(2, 0))  # somebody else had the machine
    assert online_costs.next_stale_size(1) == 2
    verify(online_costs, 2, COSTS.verify(2, 0))
    assert online_costs.next_stale_size(1) == 3
    verify(online_costs, 1, 10.0, STALE_CYCLES)
    assert online_costs.next_stale_size(1) == 2


def test_probes_have_a_budget() -> None:
    online_costs = OnlineCosts(COSTS)
    assert online_costs.try_spend(INITIAL_PROBE_STEPS * 10.0) and not online_costs.try_spend(1.0)
    verify(online_costs, 1, 10.0, 11)
    assert online_costs.try_spend(1.0) and not online_costs.try_spend(1.0)
    assert not OnlineCosts(COSTS, learns=False).try_spend(0.1)


# ---- simulated texts


def scaled(costs: Costs, every: float = 1.0, draft: float = 1.0, many: float = 1.0) -> Costs:
    """Wrong by a factor: all, draft passes, verify passes of four rows or more."""
    curve, drafts = costs.verifies[0][1], costs.drafts
    seconds = tuple(curve.at(size) * every * (many if size >= 4 else 1.0) for size in SIZES)
    wrong = replace(drafts, seconds=tuple(taken * every * draft for taken in drafts.seconds))
    return Costs(wrong, ((0, Curve(SIZES, seconds)),), costs.overhead * every)


WRONG: dict[str, dict[str, float]] = {
    "all": {"every": 3.0},
    "draft passes": {"draft": 6.0},
    "many rows": {"many": 3.0},
    "all, and draft passes": {"every": 40.0, "draft": 4.0},
    "all too cheap": {"every": 1 / 3},
}


def pace(curve: str, online_costs: OnlineCosts | None, noisy: bool, seed: int, tokens: int = 250) -> float:
    """Expected tokens a second of a text, from its first cycle on."""
    simulation, policy = Simulation(*pair(3.0), CURVES[curve], seed, online_costs, noisy), registry.policy("auto")
    said = seconds = 0.0
    while said < tokens:
        more, taken, _ = simulation.cycle(policy)
        said, seconds = said + more, seconds + taken
    return said / seconds


@cache
def best_pace(curve: str, seed: int) -> float:
    return pace(curve, None, False, seed)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("curve", ["flat, cheap head", "steps"])
def test_a_wrong_profile_costs_at_most_a_tenth_of_the_throughput(curve: str, wrong: str) -> None:
    online_costs = OnlineCosts(scaled(CURVES[curve], **WRONG[wrong]))
    assert pace(curve, online_costs, True, 1) > 0.9 * best_pace(curve, 1)


@pytest.mark.parametrize("curve", ["flat, dear drafter", "steps"])
def test_timing_noise_costs_at_most_two_percent(curve: str) -> None:
    """The cost of probing unused sizes is included."""
    seeds = range(2)
    found = sum(pace(curve, OnlineCosts(CURVES[curve]), True, seed) for seed in seeds)
    assert found > 0.98 * sum(best_pace(curve, seed) for seed in seeds)


# ---- engines


def tiny_engine(policy: str = "auto", graphs: bool = False) -> Engine:
    drafter = LMDrafter(tiny("llama", seed=1, num_hidden_layers=1))
    return Engine(Target(tiny()), drafter, registry.policy(policy), gpu_options=GpuOptions(graphs))


@pytest.mark.parametrize("graphs", [False, True])
def test_an_engine_learns_from_its_cycles_and_the_text_stays_the_same(graphs: bool) -> None:
    """The initial costs have the form of a GPU's and are about a thousand times too high."""
    dear = Costs.simple(10.0, (1, 96), (100.0, 150.0))
    given, learning = tiny_engine(graphs=graphs), tiny_engine(graphs=graphs)
    given.costs, learning.online_costs = dear, OnlineCosts(dear)
    wanted, found = (engine.generate(prompt(), max_new_tokens=40, eos=()) for engine in (given, learning))
    assert given.costs is dear
    assert learning.costs.verify(1, 0) < 50 and learning.costs.draft(1) < 5 and learning.online_costs.overestimate > 2
    assert found.token_ids == wanted.token_ids


def test_host_policies_do_not_raise_the_costs_of_the_device() -> None:
    cheap = Costs.simple(1e-7, (1, 96), (1e-6, 1.5e-6))
    engine = tiny_engine("auto", graphs=True)
    engine.online_costs = OnlineCosts(cheap)
    engine.generate(prompt(), max_new_tokens=20, eos=(), repetition_penalty=1.2)
    assert engine.fallback and engine.costs is cheap


def test_batches_do_not_change_the_costs() -> None:
    engine, dear = tiny_engine(), Costs.simple(10.0, (1, 96), (100.0, 150.0))
    engine.online_costs = OnlineCosts(dear)
    params = engine.params(max_new_tokens=40, eos=())
    for _ in itertools.islice(engine.run([prompt(), prompt(seed=1)], [params] * 2), 6):  # both go on
        assert engine.costs is dear


@pytest.mark.parametrize("wrong", [True, False])
def test_a_saved_profile_that_proved_wrong_is_marked_unsteady(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path))

    def measure(engine: Engine, **_: Any) -> Profile:
        return Profile(COSTS, profiling.describe(engine), False, 3, 1.0, True)

    monkeypatch.setattr(profiling, "measure", measure)
    engine = loading.load(Target(tiny()), "ngram", "auto")
    assert engine.online_costs.learns and engine.costs == COSTS
    verify(engine.online_costs, 1, 1.0 if wrong else 9.0, 4)
    profiling.remember(engine)
    about = profiling.describe(engine)
    kept = profiling.read(profiling.profile_file(about), about)
    assert kept is not None and kept.costs == COSTS and kept.steady != wrong


def test_draft_passes_without_new_nodes_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Target(tiny()), registry.drafter("ngram"), registry.policy("chain", depth=1))
    engine.online_costs = OnlineCosts(COSTS)
    booked: list[object] = []
    monkeypatch.setattr(engine.online_costs, "record_drafts", lambda widths, *_: booked.append(widths))
    steps = engine.generate(prompt(3, 12), max_new_tokens=40).steps
    grown = [step for step in steps if len(step.drafted) > 1]
    assert 0 < len(grown) < len(steps) and len(booked) == len(grown)


@pytest.mark.parametrize("curve", ["flat, dear drafter", "steps", "linear"])
def test_auto_stops_drafting_if_deciding_takes_too_long(curve: str) -> None:
    """`auto` drafts in every cycle if deciding is free, and hardly ever if it takes as long as ten plain steps."""
    for steps in (0.0, 10.0):
        simulation, policy, drafts = Simulation(*pair(3.0), CURVES[curve]), registry.policy("auto"), 0
        for _ in range(200):
            step = simulation.cycle(policy)[2]
            drafts += step.draft_passes > 0
            thinking = steps * CURVES[curve].verify(1, 32)
            policy.observe(replace(step, seconds=step.seconds._replace(policy=thinking)))
        assert drafts == 200 if steps == 0 else drafts < 10


def test_the_overestimate_is_kept_when_learnt_costs_are_dropped() -> None:
    online_costs = OnlineCosts(Costs.simple(10.0, (1, 96), (100.0, 150.0)))
    for _ in range(12):
        online_costs.record_verify(1, 0, 90.0)
    for _ in range(12):  # much cheaper of a sudden: what was learnt before is forgotten, but not by how much
        online_costs.record_verify(1, 0, 1.0)
        if not online_costs._verifies._own:
            break
    assert not online_costs._verifies._own
    assert online_costs.overestimate > 2
