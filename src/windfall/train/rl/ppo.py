"""The PPO of stable-baselines3, set up as configured and watched while it learns."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from windfall.policies.papers.ltd import Pair
from windfall.train.rl.config import Config
from windfall.train.rl.envs import CycleEnv, DepthEnv, Setting, SizeEnv
from windfall.train.rl.playing import Reward
from windfall.train.rl.sources import Source
from windfall.train.rl.stages import Stage

ACTIVATIONS = {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}


class Training(Protocol):
    """The training that a model is part of: what its environments are made of, and who is told how it goes."""

    config: Config
    source: Source

    def partner(self, stage: Stage) -> Pair:
        """Who the learning policy plays with."""
        ...

    def reward(self) -> Reward: ...

    def note(self, stage: Stage, step: int, reward: float) -> None:
        """What the last rollout's episodes brought."""
        ...

    def look(self, stage: Stage, model: PPO) -> None:
        """From time to time: how the policy does by now."""
        ...


def make_model(training: Training, stage: Stage) -> PPO:
    """A new policy of this stage's kind and the environments that it learns in."""
    config, seed = training.config, training.config.seed + 1000 * stage.place
    count = training.source.environments
    environments = DummyVecEnv([partial(_env, training, stage, seed + place) for place in range(count)])
    return ppo(environments, stage.kind, config, seed)


def ppo(environments: DummyVecEnv, kind: str, config: Config, seed: int) -> PPO:
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


def _env(training: Training, stage: Stage, seed: int) -> CycleEnv:
    setting = Setting(
        training.source.endless(seed),
        training.config,
        training.partner(stage),
        training.reward(),
        training.source.seconds,
        stage.alone,
        seed,
    )
    return DepthEnv(setting) if stage.kind == "depth" else SizeEnv(setting)


def snapshot(model: PPO) -> dict[str, Any]:
    """Copies of network and optimizer."""
    return {
        "policy": {name: each.clone() for name, each in model.policy.state_dict().items()},
        "optimizer": model.policy.optimizer.state_dict(),
    }


def restore(model: PPO, kept: dict[str, Any]) -> None:
    model.policy.load_state_dict(kept["policy"])
    model.policy.optimizer.load_state_dict(kept["optimizer"])


class Watcher(BaseCallback):
    """Logs the rewards of every rollout, and from time to time has the training look at the validation texts."""

    def __init__(self, training: Training, stage: Stage):
        super().__init__()
        self._training, self._stage = training, stage
        self._rewards: list[float] = []
        self._looked = -1

    def _on_step(self) -> bool:
        self._rewards += self.locals["rewards"][self.locals["dones"]].tolist()
        return True

    def _on_rollout_end(self) -> None:
        self._training.note(self._stage, self.num_timesteps, float(np.mean(self._rewards or [0.0])))
        self._rewards = []

    def _on_rollout_start(self) -> None:
        """Between updates. The environments begin anew, as looking may have used the same engine."""
        if self._looked >= 0 and self.num_timesteps < self._looked + self._training.config.validate_every:
            return
        self._looked = self.num_timesteps
        model, environments = self.model, self.training_env
        assert isinstance(model, PPO)
        self._training.look(self._stage, model)
        model._last_obs = environments.reset()  # type: ignore[assignment]
        model._last_episode_starts = np.ones((environments.num_envs,), dtype=bool)
