"""LTD training with PPO: each policy alone, then in turns with the other. The best pair on validation texts is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from windfall.core.errors import InputError
from windfall.core.files import make_folder, replace_file, replace_text
from windfall.policies.papers import ltd
from windfall.policies.papers.ltd import Layers, Network, Pair, Rules
from windfall.train.rl.config import KINDS, Config, Stage
from windfall.train.rl.envs import CycleEnv, DepthEnv, Setting, SizeEnv
from windfall.train.rl.rollout import Outcome, Reward, Source, rollout, tau, throughput

CHECKPOINT, LOG, JOB, STAGES = "checkpoint.pt", "log.jsonl", "job.json", "stages"
DEFAULT_BEAM: dict[str, Any] = {"fixed_depth": 6, "fixed_size": 59}  # 60 rows with the root
ACTIVATIONS = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}


@dataclass(frozen=True)
class Event:
    """A line of the log: after an update, or (with `throughput`) after a validation."""

    stage: str
    step: int
    progress: float  # of the whole training
    reward: float | None = None  # mean over the episodes of the last rollout
    throughput: float | None = None  # tokens per second
    tau: float | None = None
    best: bool = False  # of this stage


OnEvent = Callable[[Event], None]


@dataclass
class State:
    """The checkpoint."""

    stage: int = 0
    step: int = 0
    current: dict[str, Any] | None = None  # network and optimizer in the middle of a stage
    best: dict[str, Any] = field(default_factory=dict)  # network of each kind, the best of its latest stage
    stage_best: float = -math.inf
    written: tuple[bool, float] = (False, -math.inf)  # of the pair on file: whether it has both policies, its score


class Learner:
    """A training in a folder; `run` begins or resumes it."""

    def __init__(self, source: Source, config: Config, folder: Path):
        self.source, self.config, self.folder = source, config, folder
        self.rules = Rules(**{f.name: getattr(config, f.name) for f in fields(Rules)})
        self.stages = config.stages
        self.state = State()
        self.reward = Reward(config.reward)
        self._on_event: OnEvent = lambda _: None

    def run(self, resume: bool = False, on_event: OnEvent = lambda _: None) -> Pair:
        """Train and return the best pair on validation texts. It is in the folder from the first validation on."""
        self._open(resume)
        self._on_event = on_event
        self.reward = Reward(self.config.reward, self.config.unit or self.default_throughput("train"))
        for stage in self.stages[self.state.stage :]:
            self._train(stage)
            self.state = replace(self.state, stage=stage.place + 1, step=0, current=None, stage_best=-math.inf)
            self._write_checkpoint()
        return ltd.load(self.folder)

    def default_throughput(self, split: str) -> float:
        """The throughput of the default beam."""
        return throughput(self.rollout(Pair(replace(self.rules, **DEFAULT_BEAM)), split))

    def rollout(self, pair: Pair, split: str) -> list[Outcome]:
        """The cycles of a pair on the texts of a split."""
        backend = self.source.evaluation_backend(split)
        try:
            return rollout(backend, pair, self.source.decision_seconds)
        finally:
            backend.close()

    # ---- files

    def _open(self, resume: bool) -> None:
        file = self.folder / CHECKPOINT
        settings = json.loads(json.dumps(asdict(self.config)))
        if not resume:
            if file.exists():
                raise InputError(
                    f"'{self.folder}' holds a training already; continue it with --resume, or choose another --out"
                )
            make_folder(self.folder)
            replace_text(self.folder / JOB, json.dumps(settings, indent=2) + "\n")
            return
        try:
            before = dict(json.loads((self.folder / JOB).read_text("utf-8")))
            self.state = State(**torch.load(file, weights_only=True))
        except Exception:  # torch and pickle raise many kinds
            raise InputError(f"'{self.folder}' holds no checkpoint to resume from") from None
        if changed := [name for name in settings if before.get(name) != settings[name]]:
            differing = (f"{name} was {before.get(name)}, not {settings[name]}" for name in changed)
            raise InputError(f"'{self.folder}' was begun with other settings: {', '.join(differing)}")

    def _write_checkpoint(self) -> None:
        state = {f.name: getattr(self.state, f.name) for f in fields(State)}
        replace_file(self.folder / CHECKPOINT, lambda temporary: torch.save(state, temporary))

    def _log(self, event: Event) -> None:
        with (self.folder / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(asdict(event)) + "\n")
        self._on_event(event)

    def _save(self, pair: Pair, place: str, found: dict[str, Any]) -> None:
        about = {"validation": found, "source": self.source.about, "config": asdict(self.config)}
        ltd.save(pair, self.folder / place, about)

    # ---- a stage

    def _train(self, stage: Stage) -> None:
        seed = self.config.seed + 1000 * stage.place
        count = self.source.environments
        environments = DummyVecEnv([partial(self._environment, stage, seed + place) for place in range(count)])
        model = make_ppo(environments, stage.kind, self.config, seed)
        if self.state.current is not None:
            model.policy.load_state_dict(self.state.current["policy"])
            model.policy.optimizer.load_state_dict(self.state.current["optimizer"])
            model.num_timesteps = self.state.step
        elif stage.kind in self.state.best:
            model.policy.load_state_dict(self.state.best[stage.kind])
            if stage.place == len(KINDS):
                self._save(self._pair(stage, model), STAGES + "/iter0", {})
        left = self.config.steps(stage.kind) - self.state.step
        try:
            if left > 0:
                model.learn(left, callback=Callback(self, stage), reset_num_timesteps=False)
            self.validate(stage, model)
        finally:
            environments.close()

    def _environment(self, stage: Stage, seed: int) -> CycleEnv:
        setting = Setting(
            self.source.training_backend(seed),
            self.config,
            self._pair(stage),
            self.reward,
            self.source.decision_seconds,
            stage.alone,
            seed,
        )
        return DepthEnv(setting) if stage.kind == "depth" else SizeEnv(setting)

    def _pair(self, stage: Stage, model: PPO | None = None) -> Pair:
        """The other policy, if the stage has one, and with a model the policy that is trained."""
        names = {} if stage.alone else {kind: self._network(kind, self.state.best[kind]) for kind in KINDS}
        names.pop(stage.kind, None)
        if model is not None:
            names[stage.kind] = self._network(stage.kind, model.policy.state_dict())
        return Pair(self.rules, **names)

    def _network(self, kind: str, weights: dict[str, Any]) -> Network:
        layout = self.rules.depth_layout if kind == "depth" else self.rules.size_layout
        return Network(actor(weights), layout, self.rules.activation)

    def _progress(self, stage: Stage, step: int) -> float:
        steps = [self.config.steps(each.kind) for each in self.stages]
        return min((sum(steps[: stage.place]) + min(step, steps[stage.place])) / sum(steps), 1.0)

    def log_reward(self, stage: Stage, step: int, reward: float) -> None:
        """Log the mean reward of the last rollout."""
        self._log(Event(stage.name, step, self._progress(stage, step), reward=reward))

    def validate(self, stage: Stage, model: PPO) -> None:
        """Evaluate the policy on the validation texts; write it if it is the best, and a checkpoint."""
        assert model.env is not None
        model.env.env_method("close")
        pair = self._pair(stage, model)
        outcomes = self.rollout(pair, "validation")
        score, speed, step = self.reward.score(outcomes), throughput(outcomes), model.num_timesteps
        found: dict[str, Any] = {"stage": stage.name, "step": step, "throughput": speed, "tau": tau(outcomes)}
        weights = {name: each.clone() for name, each in model.policy.state_dict().items()}
        if best := score > self.state.stage_best:
            self.state = replace(self.state, stage_best=score, best={**self.state.best, stage.kind: weights})
            self._save(pair, f"{STAGES}/{stage.name}", found)
        complete = pair.depth is not None and pair.size is not None
        if (complete, score) > self.state.written:
            self.state = replace(self.state, written=(complete, score))
            self._save(pair, ".", found)
        current = {"policy": weights, "optimizer": model.policy.optimizer.state_dict()}
        self.state = replace(self.state, step=step, current=current)
        self._write_checkpoint()
        self._log(Event(progress=self._progress(stage, step), best=best, **found))


def make_ppo(environments: DummyVecEnv, kind: str, config: Config, seed: int) -> PPO:
    return PPO(
        "MlpPolicy",
        environments,
        learning_rate=config.rate_at,
        n_steps=max(config.rollout // environments.num_envs, 2),
        batch_size=config.batch,
        n_epochs=config.epochs,
        gamma=config.gamma(kind),
        ent_coef=config.entropy,
        policy_kwargs={"net_arch": config.network(kind), "activation_fn": ACTIVATIONS[config.activation]},
        device="cpu",
        seed=seed,
    )


class Callback(BaseCallback):
    """Logs the rewards of every rollout and validates from time to time."""

    def __init__(self, learner: Learner, stage: Stage):
        super().__init__()
        self._learner, self._stage = learner, stage
        self._rewards: list[float] = []
        self._validated = -1  # the step of the last validation

    def _on_step(self) -> bool:
        self._rewards += self.locals["rewards"][self.locals["dones"]].tolist()
        return True

    def _on_rollout_end(self) -> None:
        self._learner.log_reward(self._stage, self.num_timesteps, float(np.mean(self._rewards or [0.0])))
        self._rewards = []

    def _on_rollout_start(self) -> None:
        """Between updates. The environments are reset, because validation may have used the same engine."""
        if self._validated >= 0 and self.num_timesteps < self._validated + self._learner.config.validate_every:
            return
        self._validated = self.num_timesteps
        model, environments = self.model, self.training_env
        assert isinstance(model, PPO)
        self._learner.validate(self._stage, model)
        model._last_obs = environments.reset()  # type: ignore[assignment]
        model._last_episode_starts = np.ones((environments.num_envs,), dtype=bool)


def actor(weights: dict[str, Any]) -> Layers:
    """The policy network of a stable-baselines3 model, as plain matrices."""
    hidden = sorted(
        (int(name.split(".")[2]), name.rpartition(".")[0])
        for name in weights
        if name.startswith("mlp_extractor.policy_net.") and name.endswith(".weight")
    )
    names = [*(name for _, name in hidden), "action_net"]
    return [(_array(weights[f"{name}.weight"]), _array(weights[f"{name}.bias"])) for name in names]


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.detach().cpu().float().numpy().copy()
    return array


def read_log(folder: Path) -> Iterator[Event]:
    """The events of a training; events repeated after resuming replace the earlier ones."""
    lines = (folder / LOG).read_text("utf-8").splitlines()
    events = [Event(**json.loads(line)) for line in lines]
    yield from {(event.stage, event.step, event.throughput is None): event for event in events}.values()
