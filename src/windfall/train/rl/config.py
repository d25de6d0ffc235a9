"""How Learning to Draft is trained: the paper's numbers are the defaults, the release's are a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windfall.core import options
from windfall.core.errors import InputError
from windfall.core.options import option
from windfall.policies.papers.ltd import Rules

KINDS = ("size", "depth")


@dataclass(frozen=True)
class Config(Rules):
    """Everything that a training of the two policies can be told, besides where its cycles come from."""

    size_layers: str = option("1024,256", "hidden layers of the size policy")
    size_critic: str = option("1024,256", "hidden layers of its critic")
    depth_layers: str = option("1024", "hidden layers of the depth policy")
    depth_critic: str = option("1024,256", "hidden layers of its critic")
    size_gamma: float = option(0.9, "discount of the size policy; its episodes are one step, so it changes nothing")
    depth_gamma: float = option(0.999, "discount of the depth policy (paper 0.999, release 0.99)", low=0, high=1)
    rate: float = option(1e-3, "highest learning rate (paper 1e-3, release 3e-4)", low=0)
    warm_up: float = option(0.01, "share of the steps in which the rate rises; then it falls to 0", low=0, high=1)
    rollout: int = option(2048, "steps between updates (paper 2048, release 128)", low=2)
    batch: int = option(256, "steps of a minibatch (paper 256, release 64)", low=2)
    epochs: int = option(20, "times that an update goes through them (paper 20, release 1)", low=1)
    entropy: float = option(0.01, "weight of the entropy bonus (paper 0.01, release 0)", low=0)
    size_steps: int = option(100_000, "steps of the size policy, in each of its turns", low=1)
    depth_steps: int = option(1_000_000, "steps of the depth policy (paper 1M, release 100k)", low=1)
    curriculum: str = option(
        "uniform",
        "depth of the trees that the size policy first learns on: uniform from 1, or always the most (release)",
        choices=("uniform", "deepest"),
    )
    train: str = option("both", "which policies there are at all", choices=("both", *KINDS))
    rounds: str = option("size,depth,size", "who learns in turn after each has learnt alone; none: nobody")
    reward: str = option(
        "throughput",
        "of a cycle: tokens per second, tokens, minus seconds, or tokens minus what the seconds could have earned",
        choices=("throughput", "length", "time", "profit"),
    )
    unit: float | None = option(
        None, "tokens per second that count as 1 (release 100); none: what the default beam reaches", low=0
    )
    decision_ms: float | None = option(
        None, "milliseconds that a decision counts in the reward; none: measured, and in replays 0.03", low=0
    )
    environments: int = option(16, "replays that step together; an engine is always one", low=1)
    validate_every: int = option(8192, "steps between looks at validation texts", low=1)
    seed: int = option(0, "of networks, texts and curriculum")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("size_layers", "size_critic", "depth_layers", "depth_critic"):
            _widths(getattr(self, name), name)
        if wrong := [kind for kind in self.turns if kind not in KINDS]:
            raise InputError(f"rounds are made of size and depth, with commas between, not '{wrong[0]}'")

    @property
    def turns(self) -> list[str]:
        """Who learns, after each has learnt alone."""
        named = [] if self.rounds in ("", "none") or self.train != "both" else self.rounds.split(",")
        return [kind.strip() for kind in named]

    def network(self, kind: str) -> dict[str, list[int]]:
        """Hidden layers of the policy and of its critic."""
        layers, critic = f"{kind}_layers", f"{kind}_critic"
        return {"pi": _widths(getattr(self, layers), layers), "vf": _widths(getattr(self, critic), critic)}

    def steps(self, kind: str) -> int:
        return self.size_steps if kind == "size" else self.depth_steps

    def gamma(self, kind: str) -> float:
        return self.size_gamma if kind == "size" else self.depth_gamma

    def rate_at(self, left: float) -> float:
        """Of the steps, a share is left: the rate rises over the first, then falls in a line to 0."""
        done = 1 - left
        if done < self.warm_up:
            return self.rate * done / self.warm_up
        return self.rate * left / max(1 - self.warm_up, 1e-9)


def _widths(text: str, name: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"{name} must be widths with commas between, e.g. 1024,256, not '{text}'")
    return [int(part) for part in parts]


RECIPES: dict[str, dict[str, Any]] = {
    "quick": {"size_steps": 24_576, "depth_steps": 49_152, "epochs": 8, "validate_every": 4096, "rate": 5e-4},
    "lean": {
        "size_layers": "256,64",
        "size_critic": "256,64",
        "depth_layers": "128",
        "depth_critic": "256,64",
        "size_steps": 65_536,
        "depth_steps": 131_072,
        "epochs": 8,
        "rate": 1e-3,
        "decision_ms": 0.015,
    },
    "paper": {},
    "release": {
        "size_actions": 24,
        "size_step": 10,
        "activation": "tanh",
        "layout": "release",
        "size_gamma": 0.99,
        "depth_gamma": 0.99,
        "rate": 3e-4,
        "rollout": 128,
        "batch": 64,
        "epochs": 1,
        "entropy": 0.0,
        "depth_steps": 100_000,
        "curriculum": "deepest",
        "asked_every": 3,
        "constant_length": True,
        "max_depth": 13,
        "unit": 100.0,
        "environments": 1,
    },
}


def make_config(recipe: str, settings: dict[str, str]) -> Config:
    """A recipe by name, with settings as they were typed on top."""
    if recipe not in RECIPES:
        raise InputError(f"there is no recipe '{recipe}'; choose from {', '.join(RECIPES)}")
    return options.build(Config, {**RECIPES[recipe], **settings}, "train ltd")
