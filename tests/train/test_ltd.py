"""Learning to Draft: what the networks see and say, both backends on the same trees, PPO, files, the command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from helpers.ltd import network, random_pair
from helpers.random_heads import random_head
from helpers.table import TableDrafter, draft, random_table
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.errors import InputError
from windfall.core.types import Split, Step
from windfall.costs.curves import Costs, Curve
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target
from windfall.policies.base import best
from windfall.policies.papers import ltd
from windfall.policies.papers.ltd import NOTHING, Network, Pair, Rules, View
from windfall.train.rl.backend import Outcome
from windfall.train.rl.config import RECIPES, Config, make_config
from windfall.train.rl.live import Live, Steered
from windfall.train.rl.playing import Reward, Thinking, play, throughput
from windfall.train.rl.recording import DTYPES, Recording, record
from windfall.train.rl.replay import Replay, positions

H200 = Costs.simple(0.06e-3, (1, 64, 240), (1.0e-3, 1.3e-3, 2.0e-3), 0.1e-3)
SMALL = {"size_layers": "64", "size_critic": "64", "depth_layers": "64", "depth_critic": "64", "decision_ms": 0.0}


def view(scores: Any, length: int = 250, depth: int = 3, entropy: Any = NOTHING) -> View:
    return View(np.asarray(scores, dtype=np.float32), length, depth, np.asarray(entropy, dtype=np.float32))


# ---- what the networks see and say


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
    """The sums taken beforehand change nothing but rounding, however many candidates there are or were before."""
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
        assert len(chosen) > 1, "choices that are all the same show little"


def test_empty_places_are_missing_candidates() -> None:
    for shape in (Rules().depth_layout, Rules().size_layout):
        made, scores = network(shape, 5), np.linspace(-7.0, -1.0, 60)
        empty = np.concatenate([scores, np.full(40, -np.inf)])
        assert made.logits(view(empty)) == pytest.approx(made.logits(view(scores)), rel=1e-3, abs=1e-3)


def test_twins_do_not_share_their_work() -> None:
    one = network(Rules(parts="PDLE").depth_layout, 5)
    other, seen = one.twin(), view([-1.0, -2.0], entropy=[0.5])
    wanted = one._first(seen).copy()
    held = one._first(seen)
    other.logits(view(-np.arange(90.0), length=900, entropy=np.ones(9)))
    assert held.tolist() == wanted.tolist() == other._first(seen).tolist()


def test_copies_decide_the_same() -> None:
    """Policies are copied where a benchmark sets them back."""
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


class Says:
    """A network that always says the same, and remembers what it saw."""

    def __init__(self, action: int):
        self.action, self.seen = action, list[View]()

    def choose(self, view: View) -> int:
        self.seen.append(view)
        return self.action


def test_a_pair_heeds_its_networks_only_when_it_may() -> None:
    stop: Any = Says(0)
    pair = Pair(Rules(), stop, None)
    assert not pair.stops(view([-1.0], depth=1)) and not stop.seen  # forced to go on
    assert pair.stops(view([-1.0], depth=2)) and len(stop.seen) == 1
    go: Any = Says(1)
    assert not Pair(Rules(), go, None).stops(view([-1.0], depth=11))
    assert Pair(Rules(), go, None).stops(view([-1.0], depth=12)) and len(go.seen) == 1  # forced to stop
    constant = Pair(Rules(constant_length=True), go, None)
    constant.stops(view([-1.0], length=900, depth=4))
    assert go.seen[-1].length == 10
    assert [Pair(Rules(fixed_depth=3)).stops(view([-1.0], depth=d)) for d in (2, 3)] == [False, True]
    size: Any = Says(4)
    assert Pair(Rules(), None, size).nodes(view(-np.ones(200))) == 100
    assert Pair(Rules(), None, size).nodes(view(-np.ones(20))) == 20 and len(size.seen) == 1
    assert Pair(Rules(fixed_size=33)).nodes(view(-np.ones(200))) == 33


def test_top_is_best() -> None:
    for seed in range(20):
        tree, _, _ = draft(registry.policy("beam", depth=4, k=4), TableDrafter(random_table(9, seed, 30.0)))
        for count in (1, 2, 7, 30, 500):
            assert ltd.top(tree.score.numpy(), count).tolist() == best(tree, torch.arange(len(tree)), count).tolist()


# ---- both backends on the same trees


@cache
def engine() -> Engine:
    """Uncoupled: what a drafter that sees the noise drafts depends on a calibrator, which learns as it goes."""
    return Engine(Target(tiny()), FeatureHeadDrafter(model=random_head()), registry.policy("none"), coupled=False)


TEXTS = [(str(seed), prompt(7 + seed, seed=seed)) for seed in range(3)]


@cache
def recorded(temperature: float = 0.0) -> Recording:
    made = [*record(engine(), TEXTS, depth=5, k=3, max_new_tokens=16, temperature=temperature)]
    whole = made[0]
    for each in made[1:]:
        whole = whole.joined(each)
    return whole


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_backends_accept_the_same(temperature: float) -> None:
    prompts = [prompt for _, prompt in TEXTS]
    rules = {"k": 3, "max_depth": 5, "size_step": 2}
    pairs = [Pair(Rules(**rules, fixed_depth=d, fixed_size=n)) for d, n in ((1, 1), (4, 9))]
    for pair in (*pairs, random_pair(5, **rules, parts="PDLE")):
        live = Live(engine(), prompts, k=3, entropy="E" in pair.rules.parts, max_new_tokens=16, temperature=temperature)
        real = play(live, pair, 0.0)
        replayed = play(Replay(positions(recorded(temperature)), H200, 5), pair, 0.0)
        assert [each._replace(seconds=0) for each in real] == [each._replace(seconds=0) for each in replayed]
        assert sum(each.tokens for each in real) == 16 * len(TEXTS)
        assert all(each.seconds > 0 for each in real)


def test_cycles_that_wait_for_a_recording_count_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([2.0, 50.0, 3.0, 0.5])
    stream = Engine.stream

    def slow(self: Engine, prompt: object, **settings: Any) -> Iterator[Step]:
        for place, step in enumerate(stream(self, prompt, **settings)):
            seconds = next(taken, 1.0)
            yield replace(step, seconds=Split(verify=seconds), recorded=place in (1, 3))

    monkeypatch.setattr(Engine, "stream", slow)
    pair = Pair(Rules(k=3, max_depth=5, size_step=2, fixed_depth=1, fixed_size=1))
    live = Live(engine(), [TEXTS[0][1]], k=3, max_new_tokens=16, temperature=0.0)
    monkeypatch.setattr(Steered, "waited", property(lambda self: 0.0, lambda self, value: None), raising=False)
    assert [round(each.seconds, 6) for each in play(live, pair, 0.0)[:4]] == [2.0, 2.0, 3.0, 0.5]


def test_a_replay_is_what_the_engine_does_with_a_beam() -> None:
    """Against the engine alone, whose policy knows nothing of backends."""
    beam = Engine(engine().target, engine().drafter, registry.policy("beam", depth=4, k=3, nodes=9))
    steps = [step for _, tokens in TEXTS for step in beam.generate(tokens, max_new_tokens=16).steps]
    pair = Pair(Rules(k=3, max_depth=5, fixed_depth=4, fixed_size=8))
    replayed = play(Replay(positions(recorded()), H200, 5), pair, 0.0)
    assert [(len(s.tokens), s.draft_passes, len(s.tree) - 1) for s in steps] == [
        (each.tokens, each.passes, each.nodes) for each in replayed
    ]
    assert max(len(step.tokens) for step in steps) > 1


def test_seconds_of_a_replay_by_hand() -> None:
    costs = Costs(Curve((1, 3), (1.0, 2.0)), ((0, Curve((1, 4), (10.0, 16.0))),), overhead=0.5, opening=4.0)
    replay = Replay(positions(recorded()), costs, 5)
    assert replay.begin() and replay.draft() and replay.draft()
    outcome = replay.verify(3, thinking=0.25)
    assert outcome[1:] == (0.5 + 4.0 + 1.0 + 2.0 + 16.0 + 0.25, 2, 3)
    replay.begin()
    assert replay.verify(3, 0.0) == Outcome(1, 10.5, 0, 0)  # nothing drafted, nothing to verify


def test_recordings_are_kept_whole(tmp_path: Path) -> None:
    file = tmp_path / "trees.npz"
    recorded().save(file)
    again = Recording.load(file)
    assert again.ids == ["0", "1", "2"]
    for one, other in zip(recorded().trees(), again.trees(), strict=True):
        assert (one.text, one.length, one.left) == (other.text, other.length, other.left)
        assert np.array_equal(one.score, other.score) and np.array_equal(one.path, other.path)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(InputError, match="is no recording"):
        Recording.load(file)
    with pytest.raises(InputError, match="cannot read"):
        Recording.load(tmp_path / "none.npz")
    array = tmp_path / "array.npy"
    np.save(array, np.zeros(3))
    file.write_bytes(b"")
    for other in (file, array):
        with pytest.raises(InputError, match="is no recording"):
            Recording.load(other)
    lacking = replace(recorded(), arrays={**recorded().arrays, "path": recorded().arrays["path"][1:]})
    lacking.save(file)
    with pytest.raises(InputError, match="is no recording"):
        Recording.load(file)


def test_long_recordings_are_read_to_the_end() -> None:
    """Their paths are more nodes than a short integer counts."""
    nodes = {"tokens": [5, 6, 7], "parents": [0, 0, 1], "logq": [0.0, -1.0, -2.0], "entropy": [0.5, 0.5, np.nan]}
    places = {"sizes": [3], "lengths": [9], "rooms": [9], "texts": [0], "path": [1, 2], "steps": [2]}
    arrays = {name: np.tile(np.array(own, DTYPES[name]), 20_000) for name, own in (nodes | places).items()}
    *_, last = Recording(recorded().about, arrays).trees()
    assert last.path.tolist() == [1, 2] and last.score.tolist() == [0, -1, -3]


# ---- environments


class Ladder:
    """A synthetic backend. The first candidate's score says how many levels (2 or 4) and twenties of nodes pay off."""

    def __init__(self, seed: int | None, cycles: int = 200):
        self._random, self._left = np.random.default_rng(7 if seed is None else seed), cycles if seed is None else -1
        self.passes = self.goal = 0

    def begin(self) -> bool:
        self._left -= 1
        self.passes, self.goal = 0, 2 * int(self._random.integers(1, 3))
        return self._left != -1

    def draft(self) -> bool:
        self.passes += 1
        return True

    def view(self, newest: bool) -> View:
        return view(np.full(100, -1.5 * self.goal), length=0, depth=self.passes)

    def verify(self, nodes: int, thinking: float) -> Outcome:
        """As many tokens as levels up to the goal, if the nodes suffice for them."""
        tokens = 1 + 2 * min(self.passes, self.goal) if nodes >= 20 * self.goal else 1
        return Outcome(tokens, 0.4 + 0.2 * self.passes + nodes / 100, self.passes, nodes)

    def close(self) -> None:
        pass


class Synthetic:
    """A source of ladders."""

    environments, seconds, about = 32, 0.0, {"made": "up"}

    def endless(self, seed: int) -> Ladder:
        return Ladder(seed)

    def once(self, part: str) -> Ladder:
        return Ladder(None)


def setting(**config: Any) -> Any:
    from windfall.train.rl.envs import Setting

    made = Config(**{**SMALL, **config})
    return Setting(Ladder(0), made, Pair(Rules(fixed_size=80)), Reward(made.reward), 0.0, alone=True)


def test_depth_episodes() -> None:
    from windfall.train.rl.envs import DepthEnv

    env = DepthEnv(setting(max_depth=4))
    seen, _ = env.reset()
    assert seen.shape == env.observation_space.shape == (128,)
    assert env.step(np.int64(0))[1:4] == (0.0, False, False)  # the first word is not heeded: a second pass
    _, reward, over, _, told = env.step(np.int64(0))
    assert over and told["outcome"].passes == 2
    assert reward == pytest.approx(told["outcome"].tokens / told["outcome"].seconds)
    env.reset()
    answers = [env.step(np.int64(1)) for _ in range(4)]
    assert [answer[2] for answer in answers] == [False, False, False, True]  # forced to stop at 4
    assert answers[-1][4]["outcome"].passes == 4


def test_size_episodes_and_their_curriculum() -> None:
    from windfall.train.rl.envs import SizeEnv

    env, depths = SizeEnv(setting()), []
    for action in range(12):
        seen, _ = env.reset()
        _, _, over, _, told = env.step(np.int64(action))
        assert over and seen.shape == (1268,) and told["outcome"].nodes == 20 * (action + 1)
        depths.append(told["outcome"].passes)
    assert len(set(depths)) > 4 and 1 <= min(depths) <= max(depths) <= 12
    env = SizeEnv(setting(curriculum="deepest"))
    env.reset()
    assert env.step(np.int64(0))[4]["outcome"].passes == 12


@pytest.mark.parametrize(
    ("kind", "wanted"), [("throughput", 4 / 0.5 / 2), ("length", 4), ("time", -0.5 * 2), ("profit", 4 - 0.5 * 2)]
)
def test_rewards(kind: str, wanted: float) -> None:
    reward, other = Reward(kind, unit=2.0), Outcome(1, 1.5, 1, 20)
    assert reward.of(Outcome(4, 0.5, 3, 20)) == pytest.approx(wanted)
    chosen_by = {"length": 2.5, "time": -2.0}.get(kind, 5 / 2)  # what was asked for, or tokens per second
    assert reward.of_all([Outcome(4, 0.5, 3, 20), other]) == pytest.approx(chosen_by)


def test_thinking_is_paid_for() -> None:
    known = Thinking(0.25)
    assert known.decide(lambda seen: 7, view([-1.0])) == 7 and known.decide(len, view([-1.0])) == 4
    assert known.seconds == 0.5
    measured = Thinking(None)
    measured.decide(lambda seen: sum(range(1000)), view([-1.0]))
    assert measured.seconds > 0


# ---- learning


QUICK = {
    **SMALL, "rollout": 512, "batch": 128, "epochs": 8, "rate": 6e-3, "entropy": 0.03, "size_steps": 4096,
    "depth_steps": 6144, "validate_every": 2048, "fixed_depth": 4, "fixed_size": 80, "max_depth": 6, "rounds": "depth",
}  # fmt: skip


def test_ppo_finds_the_optimum(tmp_path: Path) -> None:
    """Each goal has its own best depth and size; fixed beams stay far below what the two networks can reach."""
    from windfall.train.rl.learning import Learner, read_log

    learner = Learner(Synthetic(), Config(**QUICK), tmp_path)
    pair = learner.run()
    optimum = throughput(_ideal())
    fixed = [throughput(learner.play(Pair(Rules(fixed_depth=d, fixed_size=20 * d)), "test")) for d in (2, 3, 4)]
    assert max(fixed) < 0.9 * optimum
    assert throughput(learner.play(pair, "test")) > 0.95 * optimum
    events = list(read_log(tmp_path))
    assert next(event.stage for event in events if event.best) == "0-size-alone"
    assert {event.stage for event in events} == {"0-size-alone", "1-depth-alone", "2-depth"}
    assert events[-1].progress == 1.0


def _ideal() -> list[Outcome]:
    ladder, outcomes = Ladder(None), []
    while ladder.begin():
        for _ in range(ladder.goal):
            ladder.draft()
        outcomes.append(ladder.verify(20 * ladder.goal, 0.0))
    return outcomes


@pytest.mark.parametrize(("kind", "recipe"), [("depth", "lean"), ("size", "release")])
def test_plain_matrices_are_the_trained_network(kind: str, recipe: str) -> None:
    """What stable-baselines3 would say of a vector, the lean path says of what the vector was made of."""
    from stable_baselines3.common.vec_env import DummyVecEnv

    from windfall.train.rl.envs import DepthEnv, Setting, SizeEnv
    from windfall.train.rl.learning import actor
    from windfall.train.rl.ppo import ppo

    config = make_config(recipe, {"environments": "1"})
    made = Setting(Ladder(0), config, Pair(config), Reward(), 0.0)
    env: Any = (DepthEnv if kind == "depth" else SizeEnv)(made)
    model = ppo(DummyVecEnv([lambda: env]), kind, config, 0)
    lean = Network(actor(model.policy.state_dict()), env.layout, config.activation)
    random = np.random.default_rng(0)
    for count in (1, 40, 100):
        seen = view(-9 * random.random(count))
        logits = model.policy.get_distribution(torch.from_numpy(env.layout.vector(seen))[None]).distribution.logits[0]
        own = torch.from_numpy(lean.logits(seen)).log_softmax(0)
        assert torch.allclose(own, logits.detach(), atol=1e-4)


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    """Ctrl-C leaves the best so far in the folder; the training goes on where it was, with the same settings only."""
    from windfall.train.rl.learning import Event, Learner, read_log

    config = Config(**{**QUICK, "size_steps": 1024, "depth_steps": 1024, "validate_every": 512})

    def interrupt(event: Event) -> None:
        if event.stage == "1-depth-alone" and event.step >= 512:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Learner(Synthetic(), config, tmp_path, interrupt).run()
    assert ltd.load(tmp_path).size is not None
    with pytest.raises(InputError, match="holds a training already"):
        Learner(Synthetic(), config, tmp_path).run()
    with pytest.raises(InputError, match="rate was "):
        Learner(Synthetic(), replace(config, rate=1e-5), tmp_path).run(resume=True)
    before = sum(1 for _ in read_log(tmp_path))
    pair = Learner(Synthetic(), config, tmp_path).run(resume=True)
    events = list(read_log(tmp_path))
    assert pair.size is not None and pair.depth is not None
    assert not [event for event in events[before:] if event.stage == "0-size-alone"]
    with pytest.raises(InputError, match="no checkpoint"):
        Learner(Synthetic(), config, tmp_path / "other").run(resume=True)


def test_learning_on_the_engine(tmp_path: Path) -> None:
    """The same loop with real cycles: a few steps, and validation in between on the same engine."""
    from windfall.train.rl.learning import Learner
    from windfall.train.rl.sources import Engines

    few = {"rollout": 16, "batch": 8, "epochs": 1, "size_steps": 32, "depth_steps": 32, "validate_every": 16}
    config = Config(**{**SMALL, **few, "k": 3, "max_depth": 4, "size_step": 3, "decision_ms": None})
    source = Engines(engine(), [prompt for _, prompt in TEXTS], config, max_new_tokens=8)
    pair = Learner(source, config, tmp_path).run()
    assert pair.depth is not None and pair.size is not None
    assert type(engine().policy).__name__ == "NoSpeculation"  # as it was


def test_every_difference_between_paper_and_release_is_a_setting() -> None:
    paper, release = make_config("paper", {}), make_config("release", {})
    assert paper == Config()
    assert all(getattr(paper, name) != value for name, value in RECIPES["release"].items())
    assert (paper.network("depth"), paper.network("size")) == (
        {"pi": [1024], "vf": [1024, 256]},
        {"pi": [1024, 256], "vf": [1024, 256]},
    )
    assert paper.rate_at(1.0) == 0 and paper.rate_at(0.99) == pytest.approx(1e-3) and release.rate_at(0.0) == 0
    for settings, reason in (
        ({"rounds": "size,width"}, "not 'width'"),
        ({"depth_layers": "a"}, "widths with commas"),
        ({"reward": "joy"}, "reward must be one of"),
        ({"joy": "1"}, "no option 'joy'"),
    ):
        with pytest.raises(InputError, match=reason):
            make_config("quick", settings)


# ---- files, the policy, the command


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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("parts", ["PDL", "PDLE"])
def test_same_text_with_random_policies(tmp_path: Path, parts: str, temperature: float) -> None:
    plain = engine().generate(prompt(), max_new_tokens=32, temperature=temperature, seed=0).token_ids
    for seed in range(3):
        ltd.save(random_pair(seed, parts=parts), tmp_path / str(seed), {})
        policy = registry.policy("ltd", path=str(tmp_path / str(seed)))
        made = Engine(engine().target, engine().drafter, policy)
        assert made.generate(prompt(), max_new_tokens=32, temperature=temperature, seed=0).token_ids == plain


def test_the_policy_does_what_the_environment_learnt_on(tmp_path: Path) -> None:
    """The engine with the policy, and the same networks played on the recording, decide alike."""
    for seed, parts in ((0, "PDL"), (1, "PDL"), (2, "PDLE")):
        ltd.save(random_pair(seed, k=3, max_depth=5, size_step=2, parts=parts), tmp_path / str(seed), {})
        pair = ltd.load(tmp_path / str(seed))
        policy = registry.policy("ltd", path=str(tmp_path / str(seed)))
        made = Engine(engine().target, engine().drafter, policy)
        steps = [step for _, tokens in TEXTS for step in made.generate(tokens, max_new_tokens=16).steps]
        replayed = play(Replay(positions(recorded()), H200, 5), pair, 0.0)
        assert [(len(s.tokens), s.draft_passes, len(s.tree) - 1) for s in steps] == [
            (each.tokens, each.passes, each.nodes) for each in replayed
        ]


def test_options_of_the_policy(tmp_path: Path) -> None:
    ltd.save(replace(random_pair(), depth=None), tmp_path, {})
    drafter = TableDrafter(random_table(12, 0))
    for settings, passes in (({}, 8), ({"depth": 3}, 3), ({"depth": 3, "k": 2}, 3)):
        tree, _, found = draft(registry.policy("ltd", path=str(tmp_path), **settings), drafter)
        assert found == passes
        assert len(tree) == 1 + settings.get("k", 10) + (passes - 1) * settings.get("k", 10) ** 2


def test_runs_without_the_training_extras(tmp_path: Path) -> None:
    ltd.save(random_pair(), tmp_path, {})
    program = f"""
import sys
sys.modules["stable_baselines3"] = sys.modules["gymnasium"] = None
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import windfall.cli
from windfall import registry
from windfall.core.errors import InputError
from windfall.train.rl.learning import check_extra
from helpers.table import TableDrafter, draft, random_table
tree, keep, passes = draft(registry.policy("ltd", path={str(tmp_path)!r}), TableDrafter(random_table(12, 0)))
assert passes >= 2 and len(keep) > 1
try:
    check_extra()
except InputError as error:
    assert "windfall[rl]" in str(error)
else:
    raise SystemExit("the missing extra was not named")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command(tmp_path: Path) -> None:
    """From a recording and a cost profile to policies, a table and figures."""
    import json

    from windfall.cli import app

    (tmp_path / "costs.json").write_text(json.dumps({"costs": H200.as_dict()}), "utf-8")
    recorded().save(tmp_path / "trees.npz")
    out = tmp_path / "out"
    small = [f"--set={name}={value}" for name, value in SMALL.items()]
    short = ["--set=k=3", "--set=max_depth=5", "--set=size_step=2", "--set=size_steps=256", "--set=depth_steps=256"]
    words = ["train", "ltd", "--out", str(out), "--recorded", str(tmp_path / "trees.npz"), *small, *short]
    words += ["--costs", str(tmp_path / "costs.json"), "--set=rollout=128", "--set=validate_every=128"]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["name"] for row in rows][:2] == ["beam 6, 60 rows (default)", "beam 8, 60 rows (EAGLE-3)"]
    assert rows[-1]["name"] == "ltd" and rows[-1]["throughput"] > 0
    assert {"curves.png", "decisions.png", "policy.safetensors", "report.json"} <= {f.name for f in out.iterdir()}
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and "--resume" in again.output
    wide = CliRunner().invoke(app, [*words[:3], str(tmp_path / "other"), *words[4:], "--set=k=4"])
    assert wide.exit_code == 2 and "record with --depth 5 --k 4" in wide.output
    (out / "checkpoint.pt").write_bytes(b"nothing")
    damaged = CliRunner().invoke(app, [*words, "--resume"])
    assert damaged.exit_code == 2 and "no checkpoint to resume from" in damaged.output


def test_a_recording_goes_on_only_with_the_same_pair(tmp_path: Path) -> None:
    from windfall.cli.train_ltd import TextOptions, write_recording

    file = tmp_path / "trees.npz"
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"id": {n}, "text": "{n}"}}\n' for n in range(3)), "utf-8")
    texts = TextOptions([str(tmp_path / "prompts.jsonl")], 3, 4, 0.0)
    recorded().save(file)
    for drafter, depth, k, other in (("head", 5, 3, "drafter, sampling"), ("", 4, 3, "depth, sampling")):
        with pytest.raises(InputError, match=f"with another {other}"):
            write_recording(engine(), drafter, texts, file, depth, k)
