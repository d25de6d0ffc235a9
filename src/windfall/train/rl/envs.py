"""Gymnasium environments. An episode is one cycle; a step is a draft pass (depth) or the whole cycle (size)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from windfall.policies.papers.ltd import Layers, Layout, Network, Pair, View
from windfall.train.rl.config import Config
from windfall.train.rl.rollout import Backend, DecisionTimer, Reward, draft_by, draft_to, nodes_by

Array = np.ndarray[Any, Any]
StepResult = tuple[Array, float, bool, bool, dict[str, Any]]


@dataclass
class Setting:
    """What both environments are made of. The pair holds the other policy, not the one that is trained."""

    backend: Backend
    config: Config
    pair: Pair
    reward: Reward
    decision_seconds: float | None = None  # None: measured
    alone: bool = False  # the size policy is trained on trees of the curriculum's depths
    seed: int = 0
    timer: DecisionTimer = field(init=False)

    def __post_init__(self) -> None:
        self.timer = DecisionTimer(self.decision_seconds)


class CycleEnv(gymnasium.Env[Array, np.int64]):
    """What both environments share: cycles of a backend whose time includes the policy's own decisions."""

    def __init__(self, setting: Setting, layout: Layout, actions: int, hidden: list[int]):
        self.setting, self.layout = setting, layout
        self.observation_space = spaces.Box(-np.inf, np.inf, (layout.size,), np.float32)
        self.action_space = spaces.Discrete(actions)
        self._timed_choice: Callable[[View], int] = no_choice
        if setting.decision_seconds is None:
            self._timed_choice = _random_network(layout, hidden, actions, setting.config.activation)

    def _observe(self, newest: bool, counts: bool = True) -> Array:
        """The observation. If its decision `counts`, a random network of the same shape stands for its time."""
        view = self.setting.backend.view(newest)
        if counts:
            self.setting.timer.decide(self._timed_choice, view)
        return self.layout.vector(view)

    def _begin(self) -> None:
        if not self.setting.backend.begin():
            raise RuntimeError("an environment needs an endless backend")
        self.setting.timer.reset()

    def _verify(self, nodes: int) -> StepResult:
        outcome = self.setting.backend.verify(nodes, self.setting.timer.seconds)
        nothing = np.zeros(self.layout.size, dtype=np.float32)
        return nothing, self.setting.reward.of(outcome), True, False, {"outcome": outcome}

    def close(self) -> None:
        self.setting.backend.close()


def no_choice(view: View) -> int:
    """Used instead of a network if the time of a decision is configured."""
    return 0


def _random_network(layout: Layout, hidden: list[int], actions: int, activation: str) -> Callable[[View], int]:
    widths = [layout.size, *hidden, actions]
    random = np.random.default_rng(0)
    layers: Layers = [
        (random.standard_normal((out, own)).astype(np.float32), np.zeros(out, dtype=np.float32))
        for own, out in pairwise(widths)
    ]
    return Network(layers, layout, activation).choose


class DepthEnv(CycleEnv):
    """Action 0 stops drafting and verifies, 1 drafts another level.

    Actions are ignored before `forced` passes and at the greatest depth.
    """

    def __init__(self, setting: Setting):
        super().__init__(setting, setting.config.depth_layout, 2, setting.config.network("depth")["pi"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._begin()
        self._more = self.setting.backend.draft()
        return self._observe(newest=True, counts=self._counts), {}

    @property
    def _counts(self) -> bool:
        return self.setting.config.forced <= self.setting.backend.passes < self.setting.config.max_depth

    def step(self, action: np.int64) -> StepResult:
        backend, config = self.setting.backend, self.setting.config
        wanted = backend.passes < config.forced or (int(action) == 1 and backend.passes < config.max_depth)
        if wanted and self._more and backend.draft():
            return self._observe(newest=True, counts=self._counts), 0.0, False, False, {}
        return self._verify(nodes_by(backend, self.setting.pair, self.setting.timer))


class SizeEnv(CycleEnv):
    """An action is the number of nodes to verify; the depth policy or the curriculum decides how deep the tree is."""

    def __init__(self, setting: Setting):
        config = setting.config
        super().__init__(setting, config.size_layout, config.size_actions, config.network("size")["pi"])
        self._random = np.random.default_rng(setting.seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._begin()
        if self.setting.alone:
            draft_to(self.setting.backend, self._curriculum_depth())
        else:
            draft_by(self.setting.backend, self.setting.pair, self.setting.timer)
        return self._observe(newest=False), {}

    def _curriculum_depth(self) -> int:
        most = self.setting.config.max_depth
        return most if self.setting.config.curriculum == "deepest" else int(self._random.integers(1, most + 1))

    def step(self, action: np.int64) -> StepResult:
        return self._verify(self.setting.config.sizes[int(action)])
