"""The correction of one request's acceptance chances."""

from __future__ import annotations

import numpy as np
import pytest

from windfall.costs.correction import MAX_SHIFT, Correction


def after(cycles: int, believed: float, true: float, seed: int = 0) -> Correction:
    """A correction after cycles with one drafted node each."""
    made, random, odds = Correction(), np.random.default_rng(seed), np.log(believed / (1 - believed))
    for _ in range(cycles):
        chance = 1 / (1 + np.exp(-odds - made.shift))
        made.learn(np.array([chance]), np.array([float(random.random() < true)]))
    return made


def test_it_starts_neutral() -> None:
    assert Correction().shift == 0


def test_it_finds_a_drafter_that_is_confident_and_wrong_within_a_dozen_cycles() -> None:
    shifts = [after(12, 0.9, 0.1, seed).shift for seed in range(20)]
    assert np.mean(shifts) < -1.5


def test_it_stays_near_zero_where_the_estimate_is_right() -> None:
    shifts = [after(60, 0.7, 0.7, seed).shift for seed in range(40)]
    assert abs(np.mean(shifts)) < 0.2 and np.std(shifts) < 0.6


def test_it_learns_the_size_of_the_error() -> None:
    shifts = [after(200, 0.9, 0.5, seed).shift for seed in range(20)]
    assert np.mean(shifts) == pytest.approx(-np.log(9), abs=0.4)


def test_it_is_bounded_and_returns_while_nothing_is_verified() -> None:
    made = after(400, 0.999, 0.0)
    assert made.shift >= -MAX_SHIFT
    before = made.shift
    for _ in range(200):
        made.learn(np.zeros(0), np.zeros(0))
    assert before / 4 < made.shift < 0
