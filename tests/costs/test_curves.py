"""Cost curves, and profiles: measured once per machine and model pair, and kept."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.random_parallel import some_drafter
from helpers.tiny import tiny
from windfall import registry
from windfall.costs.curves import ASSUMED, Costs, Curve, monotone
from windfall.engine import loading, profiling
from windfall.engine.engine import Engine
from windfall.engine.profiling import Profile, load_or_measure, measure

FEW: dict[str, Any] = {"rows": (1, 2, 4), "lengths": (16, 64), "widths": (1, 2, 4)}
COSTS = Costs(
    Curve((1, 8), (0.25, 0.5), stepped=True),
    ((64, Curve((1, 4), (1.0, 2.0))), (512, Curve((1, 4), (1.5, 3.0)))),
    overhead=0.125,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path))
    monkeypatch.setattr(profiling, "MAX_ROUNDS", 2)  # rounds end the measuring, not the clock
    return tmp_path


@pytest.fixture(scope="module")
def engine() -> Engine:
    return loading.load(tiny(), "lm", "beam")


# ---- curves


def test_a_curve_is_a_line_between_sizes_and_goes_on_after_the_last() -> None:
    curve = Curve((2, 4, 8), (1.0, 2.0, 3.0))
    assert [curve.at(size) for size in (1, 2, 3, 4, 6, 8, 12)] == [1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
    assert Curve((5,), (1.0,)).at(99) == 1.0
    assert Curve((1, 2), (2.0, 1.0)).at(9) == 1.0  # noise must not make large passes free


def test_a_short_last_segment_does_not_distort_extrapolation() -> None:
    assert Curve((1, 16, 31, 32), (1.0, 1.0, 1.0, 1.16)).at(64) == pytest.approx(1.16 + 32 * 0.01)


def test_a_stepped_curve_takes_the_next_size_up() -> None:
    curve = Curve((1, 4, 8), (1.0, 2.0, 3.0), stepped=True)
    assert [curve.at(size) for size in (1, 2, 4, 5, 8)] == [1.0, 2.0, 2.0, 3.0, 3.0]
    assert curve.at(9) > 3.0


def test_verify_passes_depend_on_rows_and_length() -> None:
    assert COSTS.verify(1, 64) == 1.0
    assert COSTS.verify(4, 288) == pytest.approx(2.5)
    assert COSTS.verify(1, 10) == 1.0
    assert COSTS.verify(7, 512) == pytest.approx(4.5)
    assert COSTS.verify_curve(4, 64) == pytest.approx([COSTS.verify(rows, 64) for rows in (1, 2, 3, 4)])
    assert COSTS.ratio == 0.25


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_the_monotone_fit(values: list[float]) -> None:
    fit = monotone(values)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(fit))
    assert sum(fit) == pytest.approx(sum(values))
    assert min(values) - 1e-9 <= fit[0] and fit[-1] <= max(values) + 1e-9
    if values == sorted(values):
        assert fit == values


def test_the_monotone_fit_pools_neighbours() -> None:
    assert monotone([1, 3, 2, 2, 5]) == pytest.approx([1, 7 / 3, 7 / 3, 7 / 3, 5])
    assert monotone([3, 2, 1]) == [2, 2, 2]


@pytest.mark.parametrize("costs", [COSTS, ASSUMED])
def test_costs_survive_json(costs: Costs) -> None:
    assert Costs.of_dict(json.loads(json.dumps(costs.as_dict()))) == costs


@pytest.mark.parametrize(
    "change",
    [
        {"verifies": []},
        {"drafts": {"sizes": [2, 1], "seconds": [1, 1]}},
        {"drafts": {"sizes": [1], "seconds": [1, 1]}},
        {"drafts": {"sizes": [1], "seconds": [math.nan]}},
        {"drafts": {"sizes": [], "seconds": []}},
        {"drafts": "x"},
        {"overhead": None},
    ],
)
def test_damaged_costs_are_noticed(change: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Costs.of_dict({**COSTS.as_dict(), **change})


# ---- measuring


def sound(curve: Curve) -> bool:
    positive = all(0 < seconds < 60 for seconds in curve.seconds)
    return positive and list(curve.seconds) == sorted(curve.seconds) and len(curve.sizes) == len(curve.seconds)


@pytest.mark.parametrize("drafter", registry.drafters())
def test_measured_curves_are_positive_finite_and_rising(drafter: str) -> None:
    engine = loading.load(tiny(), some_drafter(drafter), "beam")
    profile = measure(engine, **FEW)
    costs = profile.costs
    assert [length for length, _ in costs.verifies] == [16, 64]
    assert all(curve.sizes == (1, 2, 4) and sound(curve) for _, curve in costs.verifies)
    assert all(costs.verify(rows, 16) <= costs.verify(rows, 64) for rows in (1, 2, 4))
    assert sound(costs.drafts) and costs.drafts.sizes[-1] <= 4
    assert 0 <= costs.overhead < 60 and costs.ratio > 0
    assert profile.rounds >= 1 and not profile.full
    assert type(engine.policy).__name__ == "Beam"


def test_all_widths_of_a_model_that_drafts(engine: Engine) -> None:
    assert measure(engine, **FEW).costs.drafts.sizes == (1, 2, 4)


def test_a_drafter_that_finds_nothing_is_timed_at_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loading.load(tiny(), registry.drafter("ngram", min_match=16, max_match=16), "none")
    monkeypatch.setattr(profiling, "_text", lambda engine: list(range(1, 40)))
    assert measure(engine, **FEW).costs.drafts.sizes == (1,)


def test_sizes_keep_within_the_context(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(ticks) * 0.001)
    profile = measure(engine, rows=(1, 64, 200), lengths=(64, 512), seconds=0.1)
    assert [(length, curve.sizes) for length, curve in profile.costs.verifies] == [(64, (1, 64))]
    rows, lengths = profiling._within(24, profiling.PROFILE_ROWS, profiling.PROFILE_LENGTHS)
    assert rows[-1] == 12 and lengths == [6]


def test_what_takes_too_long_is_left_out(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr(profiling.time, "perf_counter", lambda: next(ticks) * 0.01)
    profile = measure(engine, rows=(1, 2, 4), lengths=(16, 64), widths=(1,), seconds=0.05)
    assert profile.rounds == 1
    assert [(length, curve.sizes[0]) for length, curve in profile.costs.verifies] == [(16, 1)]
    one, five, nine = (profile.costs.verify(rows, 16) for rows in (1, 5, 9))
    assert five == pytest.approx(2 * one) and nine > five  # what was not seen is not free


def test_progress_rises_to_one(engine: Engine) -> None:
    told: list[float] = []
    measure(engine, **FEW, progress=told.append)
    assert told == sorted(told) and told[0] >= 0 and told[-1] == 1


def test_an_engine_works_as_before_after_an_interrupted_measurement(engine: Engine) -> None:
    before = engine.generate(list(range(1, 9)), max_new_tokens=12).token_ids

    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_measure(engine, progress=interrupt)
    assert not list(profiling.cache_dir().rglob("*.json"))
    assert type(engine.policy).__name__ == "Beam"
    assert engine.generate(list(range(1, 9)), max_new_tokens=12).token_ids == before


# ---- kept profiles


class Measured:
    """Stands in for `measure`, and counts."""

    def __init__(self, steady: bool = True) -> None:
        self.steady, self.calls = steady, 0

    def __call__(self, engine: Engine, rows: Sequence[int] = (), **_: Any) -> Profile:
        self.calls += 1
        return Profile(COSTS, profiling.describe(engine), not rows, 3, 1.0, self.steady)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    stub = Measured()
    monkeypatch.setattr(profiling, "measure", stub)
    return stub


def test_a_profile_is_measured_once(engine: Engine, measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = load_or_measure(engine), load_or_measure(engine)
    assert first == second and first.costs == COSTS and measured.calls == 1
    assert capsys.readouterr().err == "Measuring what passes cost here (first run only)…\n"
    load_or_measure(engine, again=True)
    assert measured.calls == 2


def test_a_full_profile_replaces_a_quick_one(engine: Engine, measured: Measured) -> None:
    load_or_measure(engine)
    assert load_or_measure(engine, quick=False).full
    assert load_or_measure(engine).full
    assert measured.calls == 2


def test_other_versions_machines_and_drafters_are_measured_anew(
    engine: Engine, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_measure(engine)
    changes = [(profiling, "__version__", "9.9"), (profiling.transformers, "__version__", "9.9")]
    for calls, (place, name, value) in enumerate([*changes, (profiling, "_cpu", lambda: "another")], 2):
        monkeypatch.setattr(place, name, value)
        load_or_measure(engine)
        assert measured.calls == calls
    monkeypatch.undo()
    names = {
        profiling.profile_file(profiling.describe(loading.load(target, drafter, "none"))).name
        for target, drafter in (
            (tiny(), registry.drafter("ngram")),
            (tiny(), registry.drafter("ngram", min_match=3)),
            (tiny(dtype=torch.float64), registry.drafter("ngram")),
            (tiny(hidden_size=64), registry.drafter("ngram")),
            (tiny(), registry.drafter("lm", model=tiny())),
            (tiny(), registry.drafter("lm", model=tiny(num_hidden_layers=1))),
        )
    }
    assert len(names) == 6


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"costs": 1}', None])
def test_a_damaged_profile_is_measured_anew(engine: Engine, measured: Measured, damage: str | None) -> None:
    load_or_measure(engine)
    file = profiling.profile_file(profiling.describe(engine))
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2] if damage is None else damage)
    assert load_or_measure(engine).costs == COSTS
    assert measured.calls == 2
    assert file.read_text() == whole
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_a_profile_of_a_busy_machine_expires_early(engine: Engine, measured: Measured) -> None:
    measured.steady = False
    load_or_measure(engine)
    load_or_measure(engine)
    assert measured.calls == 1
    os.utime(profiling.profile_file(profiling.describe(engine)), (0, 0))
    load_or_measure(engine)
    assert measured.calls == 2


def test_a_read_only_cache_does_not_stop_profiling(
    engine: Engine, measured: Measured, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").touch()
    monkeypatch.setenv("WINDFALL_CACHE", str(cache / "file"))
    assert load_or_measure(engine).costs == COSTS


def test_profiles_survive_json(engine: Engine) -> None:
    profile = Profile(COSTS, profiling.describe(engine), True, 3, 1.0, True)
    assert Profile.of_dict(json.loads(json.dumps(profile.as_dict()))) == profile
    assert dataclasses.replace(profile, rounds=4) != profile


def test_disturbances_do_not_count() -> None:
    """Other processes can only make a pass slower, so the fastest run counts."""
    assert profiling.quickest_quarter([3.0]) == 3.0
    assert profiling.quickest_quarter([9.0, 3.0, 4.0, 3.5]) == 3.0
    assert profiling.quickest_quarter([9.0, 3.0, 4.0, 3.5, 3.2, 8.0, 3.1, 7.0, 5.0]) == 3.2
