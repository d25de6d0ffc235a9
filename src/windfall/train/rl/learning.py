"""Learning to Draft: each policy alone, then in turns with the other, by PPO; the best on validation texts is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from windfall.core.errors import InputError
from windfall.core.files import make_folder, replace_file, replace_text
from windfall.policies.papers import ltd
from windfall.policies.papers.ltd import Layers, Network, Pair, Rules
from windfall.train.rl.config import KINDS, Config
from windfall.train.rl.playing import Reward, play, tau, throughput
from windfall.train.rl.sources import Source
from windfall.train.rl.stages import Stage, stages

if TYPE_CHECKING:
    from stable_baselines3 import PPO

CHECKPOINT, LOG, JOB, STAGES = "checkpoint.pt", "log.jsonl", "job.json", "stages"
DEFAULT: dict[str, Any] = {
    "fixed_depth": 6,
    "fixed_size": 59,
}  # the beam that people have without choosing: 60 rows, the root counted


@dataclass(frozen=True)
class Event:
    """A line of the log: after an update, or (with `throughput`) after a look at the validation texts."""

    stage: str
    step: int
    progress: float  # of the whole training
    reward: float | None = None  # mean over the episodes of the last rollout
    throughput: float | None = None  # tokens per second
    tau: float | None = None
    best: bool = False  # of this stage


Tell = Callable[[Event], None]


@dataclass
class State:
    """What is needed to go on."""

    stage: int = 0
    step: int = 0
    current: dict[str, Any] | None = None  # network and optimizer in the midst of a stage
    best: dict[str, Any] = field(default_factory=dict)  # network of each kind, best of its latest stage
    stage_best: float = -math.inf
    written: tuple[bool, float] = (False, -math.inf)  # of the pair on file: whether it is one, and what it is worth


def check_extra() -> None:
    """Say what is missing before anything is loaded."""
    try:
        import stable_baselines3  # noqa: F401
    except ImportError:
        raise InputError("training policies needs stable-baselines3; run: pip install windfall[rl]") from None


class Learner:
    """A training in a folder; `run` begins it or goes on with it."""

    def __init__(self, source: Source, config: Config, folder: Path, tell: Tell = lambda event: None):
        self.source, self.config, self.folder, self.tell = source, config, folder, tell
        self.rules = Rules(**{f.name: getattr(config, f.name) for f in fields(Rules)})
        self.stages = stages(config)
        self.state = State()
        self.unit = 1.0

    def run(self, resume: bool = False) -> Pair:
        """The pair that does best on validation texts; it is in the folder from the first look on."""
        check_extra()
        self._open(resume)
        self.unit = self.config.unit or self.default_throughput("train")
        for stage in self.stages[self.state.stage :]:
            self._learn(stage)
            self.state = replace(self.state, stage=stage.place + 1, step=0, current=None, stage_best=-math.inf)
            self._keep()
        return ltd.load(self.folder)

    def default_throughput(self, part: str) -> float:
        """Of the default beam."""
        return throughput(self.play(Pair(replace(self.rules, **DEFAULT)), part))

    def play(self, pair: Pair, part: str) -> list[Any]:
        backend = self.source.once(part)
        try:
            return play(backend, pair, self.source.seconds)
        finally:
            backend.close()

    # ---- files

    def _open(self, resume: bool) -> None:
        file = self.folder / CHECKPOINT
        told = json.loads(json.dumps(asdict(self.config)))
        if not resume:
            if file.exists():
                raise InputError(
                    f"{self.folder} holds a training already; go on with --resume, or choose another --out"
                )
            make_folder(self.folder)
            replace_text(self.folder / JOB, json.dumps(told, indent=2) + "\n")
            return
        try:
            before = dict(json.loads((self.folder / JOB).read_text("utf-8")))
            self.state = State(**torch.load(file, weights_only=True))
        except Exception:  # torch and its pickles have many
            raise InputError(f"{self.folder} holds no checkpoint to resume from") from None
        if changed := [name for name in told if before.get(name) != told[name]]:
            differing = (f"{name} was {before.get(name)}, not {told[name]}" for name in changed)
            raise InputError(f"{self.folder} was begun with other settings: {', '.join(differing)}")

    def _keep(self) -> None:
        state = {f.name: getattr(self.state, f.name) for f in fields(State)}
        replace_file(self.folder / CHECKPOINT, lambda temporary: torch.save(state, temporary))

    def _event(self, event: Event) -> None:
        with (self.folder / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(asdict(event)) + "\n")
        self.tell(event)

    # ---- a stage

    def _learn(self, stage: Stage) -> None:
        from windfall.train.rl.ppo import Watcher, make_model, restore

        model = make_model(self, stage)
        if self.state.current is not None:
            restore(model, self.state.current)
            model.num_timesteps = self.state.step
        elif stage.kind in self.state.best:
            model.policy.load_state_dict(self.state.best[stage.kind])
            if stage.place == len(KINDS):
                self._save(self.partner(stage, model), STAGES + "/iter0", {})
        left = self.config.steps(stage.kind) - self.state.step
        try:
            if left > 0:
                model.learn(left, callback=Watcher(self, stage), reset_num_timesteps=False)
            self.look(stage, model)
        finally:
            assert model.env is not None
            model.env.close()

    def partner(self, stage: Stage, model: PPO | None = None) -> Pair:
        """Who the learning policy plays with; with a model, that policy is in the pair too."""
        names = {} if stage.alone else {kind: self.network(kind, self.state.best[kind]) for kind in KINDS}
        names.pop(stage.kind, None)
        if model is not None:
            names[stage.kind] = self.network(stage.kind, model.policy.state_dict())
        return Pair(self.rules, **names)

    def network(self, kind: str, weights: dict[str, Any]) -> Network:
        layout = self.rules.depth_layout if kind == "depth" else self.rules.size_layout
        return Network(actor(weights), layout, self.rules.activation)

    def reward(self) -> Reward:
        return Reward(self.config.reward, self.unit)

    def progress(self, stage: Stage, step: int) -> float:
        steps = [self.config.steps(each.kind) for each in self.stages]
        return min((sum(steps[: stage.place]) + min(step, steps[stage.place])) / sum(steps), 1.0)

    def note(self, stage: Stage, step: int, reward: float) -> None:
        """What the last rollout's episodes brought."""
        self._event(Event(stage.name, step, self.progress(stage, step), reward=reward))

    def look(self, stage: Stage, model: PPO) -> None:
        """Play the validation texts with the policy as it is; keep what does best, and a checkpoint."""
        from windfall.train.rl.ppo import snapshot

        assert model.env is not None
        model.env.env_method("close")
        pair = self.partner(stage, model)
        outcomes = self.play(pair, "validation")
        worth, speed, step = self.reward().of_all(outcomes), throughput(outcomes), model.num_timesteps
        found: dict[str, Any] = {"stage": stage.name, "step": step, "throughput": speed, "tau": tau(outcomes)}
        if best := worth > self.state.stage_best:
            weights = {name: each.clone() for name, each in model.policy.state_dict().items()}
            self.state = replace(self.state, stage_best=worth, best={**self.state.best, stage.kind: weights})
            self._save(pair, f"{STAGES}/{stage.name}", found)
        whole = pair.depth is not None and pair.size is not None
        if (whole, worth) > self.state.written:
            self.state = replace(self.state, written=(whole, worth))
            self._save(pair, ".", found)
        self.state = replace(self.state, step=step, current=snapshot(model))
        self._keep()
        self._event(Event(progress=self.progress(stage, step), best=best, **found))

    def _save(self, pair: Pair, place: str, found: dict[str, Any]) -> None:
        ltd.save(
            pair, self.folder / place, {"validation": found, "source": self.source.about, "config": asdict(self.config)}
        )


def actor(weights: dict[str, Any]) -> Layers:
    """The policy network of a stable-baselines3 model, as plain matrices."""
    hidden = sorted(
        (int(name.split(".")[2]), name.rpartition(".")[0])
        for name in weights
        if name.startswith("mlp_extractor.policy_net.") and name.endswith(".weight")
    )
    names = [*(name for _, name in hidden), "action_net"]
    return [(_plain(weights[f"{name}.weight"]), _plain(weights[f"{name}.bias"])) for name in names]


def _plain(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    plain: np.ndarray[Any, Any] = tensor.detach().cpu().float().numpy().copy()
    return plain


def read_log(folder: Path) -> Iterator[Event]:
    """The events of a training; of those repeated after a resumption the later ones."""
    lines = (folder / LOG).read_text("utf-8").splitlines()
    events = [Event(**json.loads(line)) for line in lines]
    yield from {(event.stage, event.step, event.throughput is None): event for event in events}.values()
