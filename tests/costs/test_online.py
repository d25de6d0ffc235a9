"""Costs that cycles put right: a wrong profile does not last, noise changes nothing, given costs stay as they are."""

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


# ---- what is believed


def test_a_quicker_pass_is_believed_at_once_and_of_its_neighbours_too() -> None:
    online_costs = warm()
    verify(online_costs, 1, 10.0, 8)
    verify(online_costs, 4, 12.0)
    assert online_costs.costs.verify(1, 0) == pytest.approx(10.0)
    assert online_costs.costs.verify(4, 0) == pytest.approx(12.0)
    assert online_costs.costs.verify(64, 0) == pytest.approx(24.0)  # three fifths as well
    assert 10.0 < online_costs.costs.verify(2, 0) < COSTS.verify(2, 0)
    assert online_costs.overestimate == pytest.approx(5 / 3)


def test_more_rows_are_never_free() -> None:
    """Or trees would grow without end."""
    online_costs = warm()
    verify(online_costs, 4, 2.0)
    verify(online_costs, 16, 1.0)
    seconds = online_costs.costs.verifies[0][1].seconds
    assert all(less < more for less, more in itertools.pairwise(seconds)) and online_costs.costs.verify(16, 0) < 10


def test_dearer_passes_are_believed_when_they_keep_coming() -> None:
    online_costs = warm()
    verify(online_costs, 4, 200.0, 3)
    assert online_costs.costs.verify(4, 0) == pytest.approx(20.0)
    verify(online_costs, 4, 60.0, 8)
    assert online_costs.costs.verify(4, 0) == pytest.approx(60.0)


def test_single_disturbances_change_nothing() -> None:
    online_costs = warm()
    for turn in range(60):
        verify(online_costs, 4, 200.0 if turn % 6 == 0 else 20.0)
        online_costs.record_drafts([1], 30.0 if turn % 7 == 0 else 1.0)
    assert online_costs.costs is COSTS


def test_costs_change_only_noticeably() -> None:
    """What policies and devices keep for these costs is made anew with every change."""
    online_costs = warm()
    for turn in range(60):
        verify(online_costs, 4, 20.0 * (1 + 0.05 * (turn % 3 - 1)))
    assert online_costs.costs is COSTS


def test_all_scales_with_a_plain_step_until_draft_passes_are_seen() -> None:
    online_costs = OnlineCosts(COSTS)
    verify(online_costs, 1, 2.0)
    assert online_costs.costs.draft(1) == pytest.approx(0.2) and online_costs.costs.opening == pytest.approx(0.1)
    assert online_costs.costs.overhead == pytest.approx(0.2)
    online_costs.record_drafts([0], 3.0)  # ten times as much, but it may have had the prompt to take in
    assert online_costs.costs.draft(1) == pytest.approx(0.2)
    online_costs.record_drafts([0, 8, 8], 0.11)
    assert online_costs.costs.draft(1) == pytest.approx(0.02) and online_costs.costs.verify(1, 0) == pytest.approx(2.0)


def test_what_had_more_to_do_is_a_bound() -> None:
    online_costs = warm()
    for _ in range(20):
        online_costs.record_drafts([0], 9.0, at_most=True)
        online_costs.record_verify(1, 0, 90.0, at_most=True)
    assert online_costs.costs is COSTS and not online_costs.knows_draft_costs
    online_costs.record_drafts([0], 0.5, at_most=True)
    assert online_costs.costs.draft(1) == pytest.approx(1 / 3)


def test_what_was_learnt_beside_other_work_is_forgotten_when_that_ends() -> None:
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


# ---- looks at what seems too dear


def test_a_size_is_looked_at_once_in_a_while() -> None:
    online_costs = warm()
    assert online_costs.next_stale_size(1) == 2
    verify(online_costs, 2, 3 * COSTS.verify(2, 0))  # somebody else had the machine
    assert online_costs.next_stale_size(1) == 2
    verify(online_costs, 2, COSTS.verify(2, 0))
    assert online_costs.next_stale_size(1) == 3
    verify(online_costs, 1, 10.0, STALE_CYCLES)
    assert online_costs.next_stale_size(1) == 2


def test_looks_have_a_budget() -> None:
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
def test_a_wrong_profile_costs_a_tenth_of_a_text_at_the_most(curve: str, wrong: str) -> None:
    online_costs = OnlineCosts(scaled(CURVES[curve], **WRONG[wrong]))
    assert pace(curve, online_costs, True, 1) > 0.9 * best_pace(curve, 1)


@pytest.mark.parametrize("curve", ["flat, dear drafter", "steps"])
def test_noise_costs_next_to_nothing(curve: str) -> None:
    """Looks at what was not seen included."""
    seeds = range(2)
    found = sum(pace(curve, OnlineCosts(CURVES[curve]), True, seed) for seed in seeds)
    assert found > 0.98 * sum(best_pace(curve, seed) for seed in seeds)


# ---- engines


def tiny_engine(policy: str = "auto", graphs: bool = False) -> Engine:
    drafter = LMDrafter(tiny("llama", seed=1, num_hidden_layers=1))
    return Engine(Target(tiny()), drafter, registry.policy(policy), launch=GpuOptions(graphs))


@pytest.mark.parametrize("graphs", [False, True])
def test_an_engine_learns_from_its_cycles_and_the_text_stays_the_same(graphs: bool) -> None:
    """Costs of a GPU's form, a thousand times too high."""
    dear = Costs.simple(10.0, (1, 96), (100.0, 150.0))
    given, learning = tiny_engine(graphs=graphs), tiny_engine(graphs=graphs)
    given.costs, learning.online_costs = dear, OnlineCosts(dear)
    wanted, found = (engine.generate(prompt(), max_new_tokens=40, eos=()) for engine in (given, learning))
    assert given.costs is dear
    assert learning.costs.verify(1, 0) < 50 and learning.costs.draft(1) < 5 and learning.online_costs.overestimate > 2
    assert found.token_ids == wanted.token_ids


def test_policies_on_the_host_teach_nothing_dearer_about_the_device() -> None:
    cheap = Costs.simple(1e-7, (1, 96), (1e-6, 1.5e-6))
    engine = tiny_engine("auto", graphs=True)
    engine.online_costs = OnlineCosts(cheap)
    engine.generate(prompt(), max_new_tokens=20, eos=(), repetition_penalty=1.2)
    assert engine.fallback and engine.costs is cheap


def test_batches_teach_nothing() -> None:
    engine, dear = tiny_engine(), Costs.simple(10.0, (1, 96), (100.0, 150.0))
    engine.online_costs = OnlineCosts(dear)
    params = engine.params(max_new_tokens=40, eos=())
    for _ in itertools.islice(engine.run([prompt(), prompt(seed=1)], [params] * 2), 6):  # both go on
        assert engine.costs is dear


@pytest.mark.parametrize("wrong", [True, False])
def test_a_kept_profile_that_cycles_proved_wrong_is_soon_forgotten(
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


def test_a_draft_pass_that_brings_nothing_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Target(tiny()), registry.drafter("ngram"), registry.policy("chain", depth=1))
    engine.online_costs = OnlineCosts(COSTS)
    booked: list[object] = []
    monkeypatch.setattr(engine.online_costs, "record_drafts", lambda widths, *_: booked.append(widths))
    steps = engine.generate(prompt(3, 12), max_new_tokens=40).steps
    grown = [step for step in steps if len(step.drafted) > 1]
    assert 0 < len(grown) < len(steps) and len(booked) == len(grown)


@pytest.mark.parametrize("curve", ["flat, dear drafter", "steps", "linear"])
def test_deciding_costs_what_it_takes(curve: str) -> None:
    """Where it takes as long as ten plain steps, as it may on a fast device, `auto` decodes plainly; else it drafts."""
    for steps in (0.0, 10.0):
        simulation, policy, drafts = Simulation(*pair(3.0), CURVES[curve]), registry.policy("auto"), 0
        for _ in range(200):
            step = simulation.cycle(policy)[2]
            drafts += step.draft_passes > 0
            thinking = steps * CURVES[curve].verify(1, 32)
            policy.observe(replace(step, seconds=step.seconds._replace(policy=thinking)))
        assert drafts == 200 if steps == 0 else drafts < 10


def test_what_was_too_dear_is_known_after_the_machine_has_got_rid_of_other_work() -> None:
    online_costs = OnlineCosts(Costs.simple(10.0, (1, 96), (100.0, 150.0)))
    for _ in range(12):
        online_costs.record_verify(1, 0, 90.0)
    for _ in range(12):  # much cheaper of a sudden: what was learnt before is forgotten, but not by how much
        online_costs.record_verify(1, 0, 1.0)
        if not online_costs._verifies._own:
            break
    assert not online_costs._verifies._own
    assert online_costs.overestimate > 2
