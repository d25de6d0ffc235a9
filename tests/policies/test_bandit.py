"""The bandit comes near the best arm in simulated worlds, also when speeds change, and keeps what it has learnt."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from helpers.bandit import World, known_worlds, random_worlds
from helpers.policies import verified
from helpers.random_parallel import some_drafter
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import InputError
from windfall.engine.engine import Engine
from windfall.model.target import Target
from windfall.policies import bandit
from windfall.policies.bandit import Bandit, Chooser, Evidence, parse_arms


def test_near_the_best_arm_in_known_worlds() -> None:
    found = known_worlds(range(6))
    assert len(found) == 54 and all(loss <= 0.03 for loss, _ in found)


def test_the_loss_in_random_worlds_is_bounded() -> None:
    found = random_worlds(range(20))
    assert all(loss <= most for loss, most in found)
    assert sum(loss > 0.03 for loss, _ in found) <= 4
    assert sum(loss for loss, _ in found) < 0.015 * len(found)


def test_one_slow_cycle_in_an_arms_first_turn_does_not_rule_it_out() -> None:
    chooser, world = Chooser(2), World(0)
    for seconds in (0.02, 0.02, 0.02, 0.02, 0.04, 60.0, 0.04, 0.04):
        chooser.observe(chooser.arm, 1 + 3 * chooser.arm, seconds)
    assert chooser.known[1].seconds == pytest.approx(0.04 * 8) and chooser.known[1].rate == pytest.approx(50)
    assert world.speed(chooser, [50.0, 100.0], 0, 400) > 90


def test_the_loss_of_a_trial_is_its_measured_loss() -> None:
    chooser, world = Chooser(3), World(0)
    world.speed(chooser, [50.0, 80.0, 100.0], 0, 400)
    while not chooser._rival:
        world.speed(chooser, [50.0, 80.0, 100.0], 0, 1)
    tried, before, fading = chooser.arm, chooser.lost, math.exp(-4 / 2000)
    assert tried != 2
    rival = chooser._rival
    for _ in range(4):
        chooser.observe(tried, 6.0, 3 / rival)  # twice as fast as the best
    assert chooser.lost == pytest.approx((before - 12 / rival) * fading)
    assert chooser.lost <= chooser.explore * chooser.played


def test_slow_drift_is_followed() -> None:
    """Every 300 cycles the speeds move a little, until the slowest arm has become the fastest."""
    for seed in range(3):
        chooser, cycles, made, best = Chooser(3), World(seed), 0.0, 0.0
        for step in range(40):
            speeds = [60.0, 100.0 - step, 60.0 + step]
            found = cycles.speed(chooser, speeds, 0, 300)
            if step >= 5:
                made, best = made + found, best + max(speeds)
        assert made >= 0.95 * best


def test_one_slow_cycle_does_not_change_the_arm() -> None:
    chooser, cycles = Chooser(2), World(0)
    cycles.speed(chooser, [50.0, 100.0], 0, 800)
    assert chooser.arm == 1
    chooser.observe(1, 1, 60.0)
    assert cycles.speed(chooser, [50.0, 100.0], 0, 200) > 95


def test_after_a_change_of_speed_only_the_changed_arms_evidence_is_kept() -> None:
    chooser, cycles = Chooser(3), World(0)
    cycles.speed(chooser, [50.0, 60.0, 100.0], 0, 1200)
    assert max(chooser.known, key=lambda own: own.rate) is chooser.known[2]
    for _ in range(400):
        before = chooser.turns
        cycles.speed(chooser, [50.0, 60.0, 30.0], 0, 1)
        if chooser.turns < before:
            break
    assert [own.turns > 0 for own in chooser.known] == [False, False, True]
    assert chooser.known[2].rate < 90 and chooser.arm == 0, "the others are tried anew"


def test_evidence_by_hand() -> None:
    evidence = Evidence()
    for tokens, seconds in ((4, 2.0), (8, 2.0)):
        evidence.add(tokens, seconds)
    assert evidence.rate == 3.0
    # residues -2 and 2, and a prior of four turns that deviate by 0.35 of 6 tokens
    assert evidence.error(evidence.rate) == pytest.approx(((8 + 4 * 2.1**2) / 6 * 2) ** 0.5 / 4)
    evidence.fade(0.5)
    assert evidence.rate == 3.0 and evidence.turns == 1.0
    assert evidence.error(6.0) == pytest.approx(2 * evidence.error(3.0))
    assert Evidence().error(1.0) == float("inf")


def test_arms_are_policies_and_presets() -> None:
    made = parse_arms("beam:depth=4:k=3+eagle-2, chain@depth=2")
    assert list(made) == ["none", "beam:depth=4:k=3", "eagle-2", "chain@depth=2"]
    assert made["beam:depth=4:k=3"] == registry.policy("beam", depth=4, k=3)
    assert made["eagle-2"] == registry.preset("eagle-2") and made["chain@depth=2"].depth == 2
    assert "none" in registry.policy("bandit").labels
    for arms, reason in (
        ("beam++auto", "separate arms with"),
        ("baem", "no policy 'baem'; choose from"),
        ("beam:width=3", "no option 'width'"),
        ("bandit", "cannot be an arm"),
    ):
        with pytest.raises(InputError, match=reason):
            registry.policy("bandit", arms=arms)


def run(policy: Any, texts: int = 6) -> list[list[int]]:
    engine = Engine(Target(tiny()), some_drafter("small"), policy)
    return [engine.generate(prompt(seed=seed), max_new_tokens=30).token_ids for seed in range(texts)]


@pytest.fixture
def unalarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing noise on this machine never makes the bandit start over."""
    monkeypatch.setattr(bandit, "CHANGE_THRESHOLD", math.inf)


@pytest.mark.usefixtures("unalarmed")
def test_texts_share_what_was_learnt_and_stay_the_same() -> None:
    policy = registry.policy("bandit", arms="chain:depth=2+beam:depth=2:k=2+gammatune", block=2)
    assert run(policy) == run(registry.policy("none"))
    assert policy.chooser.turns > 12 and all(own.turns > 0 for own in policy.chooser.known)
    mate = policy.fresh()
    assert mate.chooser is policy.chooser and mate._arms[3] is not policy._arms[3]


def test_texts_of_a_batch_play_the_same_arm() -> None:
    policy = registry.policy("bandit", arms="chain:depth=2+beam:depth=2:k=2", block=1)
    engine = Engine(Target(tiny()), some_drafter("small"), policy)
    played = []
    for steps in engine.run([prompt(seed=1), prompt(seed=2)], [engine.params(max_new_tokens=30)] * 2):
        played.append({step.draft_passes for step in steps.values()})
    assert any(0 in passes for passes in played) and {2} in played
    assert all(len(passes) == 1 for passes in played[:-4]), "near the end the room is short"


@pytest.mark.usefixtures("unalarmed")
def test_what_was_learnt_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "new" / "state.json"
    first = registry.policy("bandit", arms="chain+beam", state=str(file))
    run(first, 3)
    again = registry.policy("bandit", arms="chain+beam", state=str(file))
    assert again.chooser == first.chooser and again.chooser.turns > 0
    with pytest.raises(InputError, match=r"about the arms none\+chain\+beam"):
        registry.policy("bandit", arms="chain", state=str(file))
    kept = json.loads(file.read_text("utf-8"))
    worded = [{**own, "turns": "3"} for own in kept["known"]]
    wrong = (("arm", 9), ("known", kept["known"][:1]), ("known", worded), ("lost", "much"))
    wrong = (*wrong, ("played", float("nan")), ("turns", float("inf")))
    for text in ("", "[]", "{}", *(json.dumps({**kept, name: value}) for name, value in wrong)):
        file.write_text(text, "utf-8")
        with pytest.raises(InputError, match="not the state file of a bandit"):
            registry.policy("bandit", arms="chain+beam", state=str(file))
    assert list(file.parent.iterdir()) == [file]


def test_a_state_file_that_cannot_be_written_does_not_stop_the_text(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    policy = registry.policy("bandit", arms="chain", state=str(file))
    file.mkdir()  # cannot be replaced by a file
    verified(policy, 1, finish="stop")
    assert isinstance(policy, Bandit) and file.is_dir()
