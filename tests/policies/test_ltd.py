"""The policy `ltd`: its networks' inputs and decisions, its files, and the texts it leads to."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.ltd import engine, network, random_pair, view
from helpers.table import TableDrafter, draft, random_table
from helpers.tiny import prompt
from windfall import registry
from windfall.core.errors import InputError
from windfall.engine.engine import Engine
from windfall.policies.papers import ltd
from windfall.policies.papers.ltd import Pair, Rules, View
from windfall.train.rl.config import make_config


def test_layouts_by_hand() -> None:
    depth, size = Rules(layout="release").depth_layout, Rules(layout="release").size_layout
    assert (depth.size, size.size) == (128, 1268)
    seen = depth.vector(view([-1.0, -3.0, -2.0]))
    assert seen[:4].tolist() == [-1, -3, -2, 0] and not seen[4:100].any()
    assert seen[100:114].tolist() == pytest.approx([0.25] * 14) and seen[114:].tolist() == pytest.approx([0.3] * 14)
    whole = size.vector(view(-np.arange(1300.0)))
    assert whole[1209] == -1209 and whole[1210:1239].tolist() == pytest.approx([0.25] * 29)
    padded = Rules(layout="padded").depth_layout.vector(view([-1.0, -90.0]))
    assert padded[:3].tolist() == [-1, -20, -20]
    ranked = Rules().depth_layout.vector(view([-3.0, -1.0, -90.0]))
    assert ranked[:4].tolist() == pytest.approx([0.875, 0.625, 0, 0])


def test_observations_can_be_left_out_or_added() -> None:
    for parts, length, depth in (("PL", 0.25, 0), ("PD", 0, 0.3), ("P", 0, 0)):
        seen = Rules(parts=parts).depth_layout.vector(view([-1.0]))
        assert (float(seen[100]), float(seen[114])) == pytest.approx((length, depth))
    uncertain = Rules(parts="PDLE").depth_layout
    assert uncertain.size == 138
    assert uncertain.vector(view([-1.0], entropy=[0.5, 0.7]))[128:131].tolist() == pytest.approx([0.5, 0.7, 0])


@pytest.mark.parametrize("layout", ["ranked", "padded", "release"])
@pytest.mark.parametrize(("parts", "activation"), [("PDL", "relu"), ("PDLE", "tanh"), ("P", "relu")])
def test_folded_networks_are_the_networks(layout: str, parts: str, activation: str) -> None:
    """Precomputed sums change the logits by rounding only, for any number of candidates now and before."""
    rules, random = Rules(layout=layout, parts=parts), np.random.default_rng(1)
    for shape in (rules.depth_layout, rules.size_layout):
        made = network(shape, 5, activation=activation)
        for count in (0, 1, 37, shape.candidates, shape.candidates + 9, shape.candidates, 37, 1, 0):
            seen = view(-30 * random.random(count), entropy=random.random(min(count, 12)))
            hidden = made.layers[0][0] @ shape.vector(seen) + made.layers[0][1]
            hidden = np.tanh(hidden) if activation == "tanh" else np.maximum(hidden, 0)
            wanted = made.layers[1][0] @ hidden + made.layers[1][1]
            assert made.logits(seen) == pytest.approx(wanted, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_choices_are_the_likeliest_actions(activation: str) -> None:
    random = np.random.default_rng(2)
    for actions, shape in ((2, Rules().depth_layout), (5, Rules().size_layout)):
        chosen = set()
        for seed, count in enumerate(random.integers(1, 130, size=20)):
            made, seen = network(shape, actions, seed, activation=activation), view(-9 * random.random(count))
            chosen.add(made.choose(seen))
            assert made.choose(seen) == made.logits(seen).argmax()
        assert len(chosen) > 1, "the test needs different choices"


def test_empty_places_are_missing_candidates() -> None:
    for shape in (Rules().depth_layout, Rules().size_layout):
        made, scores = network(shape, 5), np.linspace(-7.0, -1.0, 60)
        empty = np.concatenate([scores, np.full(40, -np.inf)])
        assert made.logits(view(empty)) == pytest.approx(made.logits(view(scores)), rel=1e-3, abs=1e-3)


def test_twin_networks_share_no_buffers() -> None:
    one = network(Rules(parts="PDLE").depth_layout, 5)
    other, seen = one.twin(), view([-1.0, -2.0], entropy=[0.5])
    wanted = one._first(seen).copy()
    held = one._first(seen)
    other.logits(view(-np.arange(90.0), length=900, entropy=np.ones(9)))
    assert held.tolist() == wanted.tolist() == other._first(seen).tolist()


def test_copies_decide_the_same() -> None:
    """Benchmarks copy policies to reset them."""
    one, seen = network(Rules().size_layout, 5), view(-np.arange(1.0, 40.0))
    other = deepcopy(one)
    one.logits(view([-0.1]))
    assert other.logits(seen).tolist() == one.logits(seen).tolist() and other._opening is not one._opening


def test_sizes_and_questions() -> None:
    assert Rules().sizes == tuple(range(20, 241, 20))
    release = make_config("release", {})
    assert release.sizes == tuple(range(10, 241, 10))
    assert [passes for passes in range(1, 14) if Rules().asks(passes)] == list(range(2, 12))
    assert [passes - 1 for passes in range(1, 14) if release.asks(passes)] == [3, 6, 9]  # loops


class Constant:
    """A network that always chooses the same action and records its inputs."""

    def __init__(self, action: int):
        self.action, self.seen = action, list[View]()

    def choose(self, view: View) -> int:
        self.seen.append(view)
        return self.action


def test_a_pair_ignores_its_networks_at_the_limits_of_depth() -> None:
    stop: Any = Constant(0)
    pair = Pair(Rules(), stop, None)
    assert not pair.stops(view([-1.0], depth=1)) and not stop.seen  # forced to go on
    assert pair.stops(view([-1.0], depth=2)) and len(stop.seen) == 1
    go: Any = Constant(1)
    assert not Pair(Rules(), go, None).stops(view([-1.0], depth=11))
    assert Pair(Rules(), go, None).stops(view([-1.0], depth=12)) and len(go.seen) == 1  # forced to stop
    constant = Pair(Rules(constant_length=True), go, None)
    constant.stops(view([-1.0], length=900, depth=4))
    assert go.seen[-1].length == 10
    assert [Pair(Rules(fixed_depth=3)).stops(view([-1.0], depth=d)) for d in (2, 3)] == [False, True]
    size: Any = Constant(4)
    assert Pair(Rules(), None, size).nodes(view(-np.ones(200))) == 100
    assert Pair(Rules(), None, size).nodes(view(-np.ones(20))) == 20 and len(size.seen) == 1
    assert Pair(Rules(fixed_size=33)).nodes(view(-np.ones(200))) == 33


def test_saved_policies_decide_the_same(tmp_path: Path) -> None:
    pair = random_pair(3, parts="PDL", activation="tanh")
    ltd.save(pair, tmp_path, {"note": "tiny"})
    again = ltd.load(tmp_path)
    assert again.rules == pair.rules
    random = np.random.default_rng(0)
    for count in (1, 30, 100):
        seen = view(-10 * random.random(count))
        assert again.depth.logits(seen) == pytest.approx(pair.depth.logits(seen), abs=0.02)
        assert again.size.logits(seen) == pytest.approx(pair.size.logits(seen), abs=0.02)
    (tmp_path / ltd.FILE).write_bytes(b"nothing")
    with pytest.raises(InputError, match="can be read"):
        ltd.load(tmp_path)
    for depth in (network(pair.rules.depth_layout, 3), network(pair.rules.size_layout, 2)):
        ltd.save(replace(pair, depth=depth), tmp_path, {})
        with pytest.raises(InputError, match="must turn 128 numbers into 2"):
            ltd.load(tmp_path)
    assert pair.depth is not None
    pair.depth.layers.pop()
    ltd.save(pair, tmp_path, {})
    with pytest.raises(InputError, match="must have a hidden layer"):
        ltd.load(tmp_path)
    with pytest.raises(InputError, match="train some with: windfall train ltd"):
        registry.policy("ltd", path=str(tmp_path / "other"))


@pytest.mark.parametrize(("parts", "temperature"), [("PDL", 0.0), ("PDLE", 1.0)])
def test_same_text_with_random_policies(tmp_path: Path, parts: str, temperature: float) -> None:
    plain = engine().generate(prompt(), max_new_tokens=20, temperature=temperature, seed=0).token_ids
    for seed in range(2):
        ltd.save(random_pair(seed, parts=parts), tmp_path / str(seed), {})
        policy = registry.policy("ltd", path=str(tmp_path / str(seed)))
        made = Engine(engine().target, engine().drafter, policy)
        assert made.generate(prompt(), max_new_tokens=20, temperature=temperature, seed=0).token_ids == plain


def test_options_of_the_policy(tmp_path: Path) -> None:
    ltd.save(replace(random_pair(), depth=None), tmp_path, {})
    drafter = TableDrafter(random_table(12, 0))
    for settings, passes in (({}, 8), ({"depth": 3}, 3), ({"depth": 3, "k": 2}, 3)):
        tree, _, found = draft(registry.policy("ltd", path=str(tmp_path), **settings), drafter)
        assert found == passes
        assert len(tree) == 1 + settings.get("k", 10) + (passes - 1) * settings.get("k", 10) ** 2
