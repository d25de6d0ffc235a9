"""LTD training: environments, rewards, PPO, resuming, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv
from typer.testing import CliRunner

from helpers.ltd import H200, TEXTS, engine, random_pair, recorded, view
from windfall.cli import app
from windfall.core.errors import InputError
from windfall.policies.papers import ltd
from windfall.policies.papers.ltd import Network, Pair, Rules, View
from windfall.train.rl.config import RECIPES, Config, make_config
from windfall.train.rl.envs import DepthEnv, Setting, SizeEnv
from windfall.train.rl.learner import Event, Learner, actor, make_ppo, read_log
from windfall.train.rl.live import LiveSource
from windfall.train.rl.rollout import DecisionTimer, Outcome, Reward, throughput

SMALL = {"size_layers": "64", "size_critic": "64", "depth_layers": "64", "depth_critic": "64", "decision_ms": 0.0}


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

    def verify(self, nodes: int, decision_seconds: float) -> Outcome:
        """As many tokens as levels up to the goal, if the nodes suffice for them."""
        tokens = 1 + 2 * min(self.passes, self.goal) if nodes >= 20 * self.goal else 1
        return Outcome(tokens, 0.4 + 0.2 * self.passes + nodes / 100, self.passes, nodes)

    def close(self) -> None:
        pass


class Synthetic:
    """A source of ladders."""

    environments, decision_seconds, about = 32, 0.0, {"made": "up"}

    def training_backend(self, seed: int) -> Ladder:
        return Ladder(seed)

    def evaluation_backend(self, split: str) -> Ladder:
        return Ladder(None)


def setting(**config: Any) -> Any:
    made = Config(**{**SMALL, **config})
    return Setting(Ladder(0), made, Pair(Rules(fixed_size=80)), Reward(made.reward), 0.0, alone=True)


def test_depth_episodes() -> None:
    env = DepthEnv(setting(max_depth=4))
    seen, _ = env.reset()
    assert seen.shape == env.observation_space.shape == (128,)
    assert env.step(np.int64(0))[1:4] == (0.0, False, False)  # the first action is ignored: a second pass
    _, reward, over, _, info = env.step(np.int64(0))
    assert over and info["outcome"].passes == 2
    assert reward == pytest.approx(info["outcome"].tokens / info["outcome"].seconds)
    env.reset()
    answers = [env.step(np.int64(1)) for _ in range(4)]
    assert [answer[2] for answer in answers] == [False, False, False, True]  # forced to stop at 4
    assert answers[-1][4]["outcome"].passes == 4


def test_size_episodes_and_their_curriculum() -> None:
    env, depths = SizeEnv(setting()), []
    for action in range(12):
        seen, _ = env.reset()
        _, _, over, _, info = env.step(np.int64(action))
        assert over and seen.shape == (1268,) and info["outcome"].nodes == 20 * (action + 1)
        depths.append(info["outcome"].passes)
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
    assert reward.score([Outcome(4, 0.5, 3, 20), other]) == pytest.approx(chosen_by)


def test_decision_times_are_added() -> None:
    known = DecisionTimer(0.25)
    assert known.decide(lambda seen: 7, view([-1.0])) == 7 and known.decide(len, view([-1.0])) == 4
    assert known.seconds == 0.5
    measured = DecisionTimer(None)
    measured.decide(lambda seen: sum(range(1000)), view([-1.0]))
    assert measured.seconds > 0


QUICK = {
    **SMALL, "rollout": 512, "batch": 128, "epochs": 8, "rate": 6e-3, "entropy": 0.03, "size_steps": 4096,
    "depth_steps": 6144, "validate_every": 4096, "fixed_depth": 4, "fixed_size": 80, "max_depth": 6, "rounds": "depth",
}  # fmt: skip


def test_ppo_finds_the_optimum(tmp_path: Path) -> None:
    """Each goal has its own best depth and size, so fixed beams stay far below the optimum."""
    learner = Learner(Synthetic(), Config(**QUICK), tmp_path)
    pair = learner.run()
    optimum = throughput(_ideal())
    fixed = [throughput(learner.rollout(Pair(Rules(fixed_depth=d, fixed_size=20 * d)), "test")) for d in (2, 3, 4)]
    assert max(fixed) < 0.9 * optimum
    assert throughput(learner.rollout(pair, "test")) > 0.95 * optimum
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
def test_the_exported_network_equals_the_trained_one(kind: str, recipe: str) -> None:
    """The exported network gives the logits of the stable-baselines3 model."""
    config = make_config(recipe, {"environments": "1"})
    made = Setting(Ladder(0), config, Pair(config), Reward(), 0.0)
    env: Any = (DepthEnv if kind == "depth" else SizeEnv)(made)
    model = make_ppo(DummyVecEnv([lambda: env]), kind, config, 0)
    lean = Network(actor(model.policy.state_dict()), env.layout, config.activation)
    random = np.random.default_rng(0)
    for count in (1, 40, 100):
        seen = view(-9 * random.random(count))
        logits = model.policy.get_distribution(torch.from_numpy(env.layout.vector(seen))[None]).distribution.logits[0]
        own = torch.from_numpy(lean.logits(seen)).log_softmax(0)
        assert torch.allclose(own, logits.detach(), atol=1e-4)


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    """After an interruption the best pair is in the folder, and the training resumes with the same settings only."""
    config = Config(**{**QUICK, "size_steps": 1024, "depth_steps": 1024, "validate_every": 512})

    def interrupt(event: Event) -> None:
        if event.stage == "1-depth-alone" and event.step >= 512:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Learner(Synthetic(), config, tmp_path).run(on_event=interrupt)
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
    """A few steps with real cycles, and validations between them on the same engine."""
    few = {"rollout": 16, "batch": 8, "epochs": 1, "size_steps": 32, "depth_steps": 32, "validate_every": 16}
    config = Config(**{**SMALL, **few, "k": 3, "max_depth": 4, "size_step": 3, "decision_ms": None, "rounds": "depth"})
    source = LiveSource(engine(), [prompt for _, prompt in TEXTS], config, max_new_tokens=8)
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
        ({"depth_layers": "a"}, "widths separated by commas"),
        ({"reward": "joy"}, "reward must be one of"),
        ({"joy": "1"}, "no option 'joy'"),
    ):
        with pytest.raises(InputError, match=reason):
            make_config("quick", settings)


def test_runs_without_the_training_extras(tmp_path: Path) -> None:
    ltd.save(random_pair(), tmp_path, {})
    program = f"""
import sys
sys.modules["stable_baselines3"] = sys.modules["gymnasium"] = None
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import windfall.cli
from windfall import registry
from windfall.core.errors import InputError
from windfall.train.rl.config import check_extra
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
