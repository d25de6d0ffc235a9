from __future__ import annotations

import copy
import json
from functools import cache

import numpy as np
import pytest
import torch

from helpers.simulation import Simulation
from helpers.table import random_table
from windfall import registry
from windfall.core.tree import DraftTree
from windfall.costs.acceptance import Calibrator, expected_calibration_error
from windfall.costs.curves import ASSUMED


@cache
def overconfident(cycles: int = 400) -> tuple[Calibrator, np.ndarray, np.ndarray, np.ndarray]:
    """A drafter twice as sure as it should be: what it said, what we made of it beforehand, and what came."""
    target = random_table(20, 3, 1.2)
    simulation = Simulation(target, torch.softmax(2.5 * target.log(), -1), ASSUMED)
    policy, said, made, came = registry.policy("beam", depth=3, k=4, nodes=20), [], [], []
    for _ in range(cycles):
        root = simulation.root
        believed = Calibrator.of_dict(simulation.calibrator.as_dict())
        step = simulation.cycle(policy)[2]
        assert int(step.tree.tokens[0]) == root
        on_path = set(step.path.tolist())
        judged = [n for n in range(1, len(step.tree)) if int(step.tree.parents[n]) in on_path]
        said += step.tree.logq[judged].exp().tolist()
        made += [believed.accept(step.tree)[n - 1] for n in judged]
        came += [float(n in on_path) for n in judged]
    return simulation.calibrator, np.array(said), np.array(made), np.array(came)


def test_chances_of_a_large_tree_equal_those_of_accept() -> None:
    calibrator, *_ = overconfident()
    step = Simulation(random_table(20, 3, 1.2), random_table(20, 4, 1.2), ASSUMED).cycle(
        registry.policy("beam", depth=8, k=4, nodes=60)
    )[2]
    assert len(step.drafted) > 60 and calibrator.weights[0] != 1
    np.testing.assert_allclose(calibrator.chances(step.drafted), calibrator.accept(step.drafted), rtol=1e-9)


def test_a_new_calibrator_returns_the_drafters_probabilities() -> None:
    tree = DraftTree.root(0).extend(
        torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([0.7, 0.2]).log(), torch.arange(2)
    )
    assert Calibrator().accept(tree) == pytest.approx([0.7, 0.2], abs=1e-5)


def test_overconfidence_is_corrected_while_decoding() -> None:
    calibrator, said, made, came = overconfident()
    late = slice(len(said) // 2, None)
    before, after = (expected_calibration_error(x[late], came[late]) for x in (said, made))
    assert before > 0.06
    assert after < 0.5 * before
    assert calibrator.weights[0] < 0.8  # log-odds are shrunk
    assert calibrator.as_dict()["observed"] == len(said)


def test_kappa_grows_for_an_overconfident_drafter() -> None:
    calibrator, *_ = overconfident()
    assert calibrator.kappa > 1.2


def test_kappa_is_updated_by_siblings_of_which_one_was_accepted() -> None:
    logq = np.log([0.6, 0.3, 0.1, 0.9, 0.05, 0.5, 0.4])
    families, accepted = np.array([0, 0, 0, 3, 3, 9, 9]), np.array([0, 1.0, 0, 0, 0, 1.0, 0])
    expected = 1.0
    for family in (0, 9):
        own, hit = logq[families == family], accepted[families == family] > 0
        expected *= np.exp(0.02 * (np.exp(own) @ own / np.exp(own).sum() - own[hit][0]))
    calibrator = Calibrator()
    calibrator._fit_kappa(logq, accepted, families)
    assert calibrator.kappa == pytest.approx(expected) and calibrator.kappa != 1
    calibrator._fit_kappa(logq, np.zeros(7), families)
    assert calibrator.kappa == pytest.approx(expected)


def test_min_draft_passes_is_exceeded_in_four_of_five_cycles() -> None:
    calibrator, numbers = Calibrator(), np.random.default_rng(0)
    assert calibrator.min_draft_passes == 1
    wanted = numbers.integers(3, 13, 4000)
    levels = []
    for each in wanted:
        levels.append(calibrator.min_draft_passes)
        fewest = calibrator.min_draft_passes + 1  # a decision after the unasked passes comes too late for fewer
        calibrator.record_draft_passes(max(int(each), fewest))
    ended = np.mean([each <= least + 1 for each, least in zip(wanted[200:], levels[200:], strict=True)])
    assert 0.17 < ended < 0.23 and 3 <= np.mean(levels[200:]) <= 5
    assert Calibrator.of_dict(calibrator.as_dict()).min_draft_passes == calibrator.min_draft_passes
    for _ in range(40):
        calibrator.record_draft_passes(2)
    assert calibrator.min_draft_passes == 1


def test_weights_drift_back_to_the_prior() -> None:
    calibrator = copy.deepcopy(overconfident()[0])
    for _ in range(20_000):
        calibrator.drift_to_prior()
    assert calibrator.weights == pytest.approx(Calibrator().weights, abs=1e-3)


def test_a_calibrator_is_saved_and_restored() -> None:
    calibrator, *_ = overconfident()
    again = Calibrator.of_dict(json.loads(json.dumps(calibrator.as_dict())))
    assert again.as_dict() == calibrator.as_dict()
    with pytest.raises(ValueError, match="weights is damaged"):
        Calibrator.of_dict({**calibrator.as_dict(), "weights": [1.0]})


def test_calibration_error_by_hand() -> None:
    chances, outcomes = np.array([0.9, 0.9, 0.1, 0.1]), np.array([1.0, 0.0, 0.0, 0.0])
    assert expected_calibration_error(chances, outcomes) == pytest.approx(0.5 * 0.4 + 0.5 * 0.1)
