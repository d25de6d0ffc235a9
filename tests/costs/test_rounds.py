"""The costs of a batch's rounds, corrected by their times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windfall.costs.curves import Costs, Curve
from windfall.costs.rounds import RECENT_ROUNDS, UPDATE_EVERY_ROUNDS, RoundCosts, Situation

ROWS = (8, 16, 32, 64, 128, 256)
MEASURED = Costs(
    Curve((1, 8, 64), (1.0, 1.1, 2.0)),
    ((128, Curve((1, 64), (4.0, 5.0))), (1024, Curve((1, 64), (5.0, 8.0)))),
    0.5,
    0.3,
)
NOW = Situation(seats=16, requests=12, length=128)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 100)), min_size=1, max_size=5, unique_by=lambda each: each[0]),
    st.booleans(),
    st.lists(st.integers(1, 120), min_size=1),
)
def test_many_sizes_at_once_are_the_same_as_one_by_one(
    points: list[tuple[int, float]], stepped: bool, sizes: list[int]
) -> None:
    curve = Curve(*zip(*sorted(points), strict=True), stepped)
    assert curve.over(np.array(sizes)) == pytest.approx([curve.at(size) for size in sizes])


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=4, unique=True), st.integers(0, 5000), st.integers(1, 99))
def test_verify_passes_of_many_sizes(lengths: list[int], length: int, rows: int) -> None:
    costs = Costs(
        Curve((1,), (1.0,)), tuple((each, Curve((1, 64), (4.0 + each / 500, 5.0 + each))) for each in sorted(lengths))
    )
    assert costs.verify_over(np.array([rows, 7]), length) == pytest.approx(
        [costs.verify(rows, length), costs.verify(7, length)]
    )


def test_at_first_they_are_those_of_one_text_in_prepared_sizes() -> None:
    costs = RoundCosts(MEASURED, ROWS).at(NOW)
    assert costs.verify(12, 0) == costs.verify(16, 999) == pytest.approx(MEASURED.verify(16, 128))
    assert costs.verify(17, 0) == pytest.approx(MEASURED.verify(32, 128))
    assert costs.draft(24) == pytest.approx(MEASURED.draft(24))
    assert (costs.overhead, costs.opening) == (0.5, 0.3)


def test_times_of_rounds_correct_them() -> None:
    made = RoundCosts(MEASURED, ROWS)
    before = made.at(NOW)
    assert made.at(NOW) is before is made.at(NOW._replace(length=140))
    for _ in range(UPDATE_EVERY_ROUNDS // 2):
        assert made.at(NOW) is before
        made.record_verify(NOW, 16, MEASURED.verify(16, 128))
        made.record_verify(NOW, 128, 2 * MEASURED.verify(128, 128))
        made.record_drafts(NOW, 3, 2, 3 * (0.3 + MEASURED.draft(12) + 2 * MEASURED.draft(24)))
    after = made.at(NOW)
    assert after is not before
    assert after.verify(16, 0) == pytest.approx(before.verify(16, 0))
    assert after.verify(128, 0) == pytest.approx(2 * before.verify(128, 0))
    assert after.verify(256, 0) == pytest.approx(2 * before.verify(256, 0))  # as the nearest size
    assert before.verify(64, 0) < after.verify(64, 0) < 2 * before.verify(64, 0)
    assert after.draft(24) == pytest.approx(3 * before.draft(24)) and after.opening == pytest.approx(0.9)
    other = made.at(NOW._replace(seats=32, requests=30))  # a number of seats that has not run
    assert other.verify(128, 0) == pytest.approx(2 * MEASURED.verify(128, 128))


def test_a_slow_round_is_not_believed_and_small_changes_keep_the_object() -> None:
    made = RoundCosts(MEASURED, ROWS)
    expected = MEASURED.verify(16, 128)
    for _ in range(4):
        made.record_verify(NOW, 16, expected)
    known = made.at(NOW)
    made.record_verify(NOW, 16, 9 * expected)
    made.record_verify(NOW, 16, 1.02 * expected)
    assert made.at(NOW) is known
    for _ in range(RECENT_ROUNDS):
        made.record_verify(NOW, 16, 3 * expected)
    assert made.at(NOW).verify(16, 0) == pytest.approx(3 * expected)


def test_given_costs_stay() -> None:
    made = RoundCosts(MEASURED, ROWS, learns=False)
    made.record_verify(NOW, 16, 100.0)
    assert made.at(NOW).verify(16, 0) == pytest.approx(MEASURED.verify(16, 128))


def record_round(costs: RoundCosts, drafted: bool, idle: float) -> None:
    """A round that takes as long as expected, after the device was idle."""
    costs.record_idle(NOW, drafted, idle)
    costs.record_verify(NOW, 16, MEASURED.verify(16, 128))


def test_idle_times_are_part_of_the_costs() -> None:
    """A host that is late delays every round; if plain ones are delayed more, drafting is cheaper by the difference."""
    costs = RoundCosts(MEASURED, ROWS)
    usual = costs.at(NOW)
    for _ in range(40):
        record_round(costs, False, 0.2)
    assert costs.at(NOW).overhead == pytest.approx(usual.overhead + 0.2, abs=0.01)
    assert costs.at(NOW).opening == usual.opening  # rounds with drafts should be delayed as much
    for _ in range(40):
        record_round(costs, True, 0.05)
    assert costs.at(NOW).opening == pytest.approx(usual.opening - 0.15, abs=0.01)
    assert costs.at(NOW).overhead == pytest.approx(usual.overhead + 0.2, abs=0.01)
    assert costs.at(NOW._replace(seats=32)).overhead == usual.overhead


def test_a_host_that_is_late_with_drafts_only() -> None:
    costs = RoundCosts(MEASURED, ROWS)
    for drafted in [False, True] * 40:
        record_round(costs, drafted, 0.1 * drafted)
    assert costs.at(NOW).overhead == MEASURED.overhead
    assert costs.at(NOW).opening == pytest.approx(MEASURED.opening + 0.1, abs=0.01)


def test_a_single_long_pause_counts_little() -> None:
    costs = RoundCosts(MEASURED, ROWS)
    for seconds in (*[0.1] * 30, 50.0):
        record_round(costs, False, seconds)
    assert costs.at(NOW).overhead < MEASURED.overhead + 0.12


def test_recent_costs_are_those_that_were_last_asked_for() -> None:
    made = RoundCosts(MEASURED, ROWS)
    first = made.recent(NOW)
    assert first is made.at(NOW)
    other = made.at(NOW._replace(length=1024))
    assert other is not first
    assert made.recent(NOW) is other
    assert made.recent(NOW._replace(seats=32)) is made.at(NOW._replace(seats=32))
