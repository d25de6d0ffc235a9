"""Gymnasium environments: a step is a draft pass (depth) or a cycle (size), an episode is one cycle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from windfall.policies.papers.ltd import Layers, Layout, Network, Pair, View
from windfall.train.rl.backend import Backend
from windfall.train.rl.config import Config
from windfall.train.rl.playing import Reward, Thinking, grow_by, grow_to, nodes_by

Array = np.ndarray[Any, Any]
Answer = tuple[Array, float, bool, bool, dict[str, Any]]


@dataclass
class Setting:
    """What both environments are made of. The pair is the partner's: the policy that learns is not in it."""

    backend: Backend
    config: Config
    pair: Pair
    reward: Reward
    seconds: float | None = None  # of a decision; None: measured
    alone: bool = False  # the size policy learns on trees of the curriculum's depths
    seed: int = 0
    thinking: Thinking = field(init=False)

    def __post_init__(self) -> None:
        self.thinking = Thinking(self.seconds)


class CycleEnv(gymnasium.Env[Array, np.int64]):
    """The part that both share: cycles come from a backend, and the policy's own thinking is paid for."""

    def __init__(self, setting: Setting, layout: Layout, actions: int, hidden: list[int]):
        self.setting, self.layout = setting, layout
        self.observation_space = spaces.Box(-np.inf, np.inf, (layout.size,), np.float32)
        self.action_space = spaces.Discrete(actions)
        self._double = _stand_in(layout, hidden, actions, setting.config.activation)

    def _observe(self, newest: bool, heeded: bool = True) -> Array:
        """What the learning policy sees; if it will be heeded, a network of its shape thinks about it on the clock."""
        view = self.setting.backend.view(newest)
        if heeded:
            self.setting.thinking.decide(self._double if self.setting.seconds is None else no_choice, view)
        return self.layout.vector(view)

    def _begin(self) -> None:
        if not self.setting.backend.begin():
            raise RuntimeError("an environment needs texts without end")
        self.setting.thinking.start()

    def _verify(self, nodes: int) -> Answer:
        outcome = self.setting.backend.verify(nodes, self.setting.thinking.seconds)
        nothing = np.zeros(self.layout.size, dtype=np.float32)
        return nothing, self.setting.reward.of(outcome), True, False, {"outcome": outcome}

    def close(self) -> None:
        self.setting.backend.close()


def no_choice(view: View) -> int:
    """Stands for a decision whose time is known."""
    return 0


def _stand_in(layout: Layout, hidden: list[int], actions: int, activation: str) -> Callable[[View], int]:
    widths = [layout.size, *hidden, actions]
    random = np.random.default_rng(0)
    layers: Layers = [
        (random.standard_normal((out, own)).astype(np.float32), np.zeros(out, dtype=np.float32))
        for own, out in pairwise(widths)
    ]
    return Network(layers, layout, activation).choose


class DepthEnv(CycleEnv):
    """0 stops drafting and verifies, 1 drafts another level. Unheeded before `forced` passes and at the deepest."""

    def __init__(self, setting: Setting):
        super().__init__(setting, setting.config.depth_layout, 2, setting.config.network("depth")["pi"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._begin()
        self._more = self.setting.backend.draft()
        return self._observe(newest=True, heeded=self._heeded), {}

    @property
    def _heeded(self) -> bool:
        return self.setting.config.forced <= self.setting.backend.passes < self.setting.config.max_depth

    def step(self, action: np.int64) -> Answer:
        backend, config = self.setting.backend, self.setting.config
        wanted = backend.passes < config.forced or (int(action) == 1 and backend.passes < config.max_depth)
        if wanted and self._more and backend.draft():
            return self._observe(newest=True, heeded=self._heeded), 0.0, False, False, {}
        return self._verify(nodes_by(backend, self.setting.pair, self.setting.thinking))


class SizeEnv(CycleEnv):
    """An action is how many of the drafted nodes to verify; the tree is grown by the partner or the curriculum."""

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
            grow_to(self.setting.backend, self._curriculum())
        else:
            grow_by(self.setting.backend, self.setting.pair, self.setting.thinking)
        return self._observe(newest=False), {}

    def _curriculum(self) -> int:
        most = self.setting.config.max_depth
        return most if self.setting.config.curriculum == "deepest" else int(self._random.integers(1, most + 1))

    def step(self, action: np.int64) -> Answer:
        return self._verify(self.setting.config.sizes[int(action)])
