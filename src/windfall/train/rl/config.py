"""The settings of LTD training. The defaults are the paper's; the released code's are the recipe `release`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windfall.core import options
from windfall.core.errors import InputError
from windfall.core.options import option
from windfall.policies.papers.ltd import Rules

KINDS = ("size", "depth")


@dataclass(frozen=True)
class Stage:
    """A stage of the training: one policy is trained, alone or with the other one fixed."""

    place: int
    kind: str
    alone: bool

    @property
    def name(self) -> str:
        return f"{self.place}-{self.kind}{'-alone' if self.alone else ''}"


@dataclass(frozen=True)
class Config(Rules):
    """The settings of training the two policies."""

    size_layers: str = option("1024,256", "hidden layers of the size policy")
    size_critic: str = option("1024,256", "hidden layers of its critic")
    depth_layers: str = option("1024", "hidden layers of the depth policy")
    depth_critic: str = option("1024,256", "hidden layers of its critic")
    size_gamma: float = option(0.9, "discount of the size policy; its episodes are one step, so it changes nothing")
    depth_gamma: float = option(0.999, "discount of the depth policy (paper 0.999, release 0.99)", low=0, high=1)
    rate: float = option(1e-3, "highest learning rate (paper 1e-3, release 3e-4)", low=0)
    warm_up: float = option(0.01, "share of the steps in which the rate rises; then it falls to 0", low=0, high=1)
    rollout: int = option(2048, "environment steps between updates (paper 2048, release 128)", low=2)
    batch: int = option(256, "steps of a minibatch (paper 256, release 64)", low=2)
    epochs: int = option(20, "epochs of an update (paper 20, release 1)", low=1)
    entropy: float = option(0.01, "weight of the entropy bonus (paper 0.01, release 0)", low=0)
    size_steps: int = option(100_000, "steps of the size policy, in each of its stages", low=1)
    depth_steps: int = option(1_000_000, "steps of the depth policy (paper 1M, release 100k)", low=1)
    curriculum: str = option(
        "uniform",
        "depth of the trees on which the size policy is first trained: uniform, or always the greatest (release)",
        choices=("uniform", "deepest"),
    )
    train: str = option("both", "which policies are trained", choices=("both", *KINDS))
    rounds: str = option("size,depth,size", "the order of training after each policy was trained alone; none: no more")
    reward: str = option(
        "throughput",
        "of a cycle: tokens per second, tokens, minus seconds, or tokens minus seconds times `unit`",
        choices=("throughput", "length", "time", "profit"),
    )
    unit: float | None = option(
        None, "tokens per second that are a reward of 1 (release 100); none: those of the default beam", low=0
    )
    decision_ms: float | None = option(
        None, "milliseconds of a decision in the reward; none: measured, or 0.03 in replays", low=0
    )
    environments: int = option(16, "replays that step together; with an engine there is always one", low=1)
    validate_every: int = option(8192, "steps between validations", low=1)
    seed: int = option(0, "seed of networks, texts and curriculum")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("size_layers", "size_critic", "depth_layers", "depth_critic"):
            _widths(getattr(self, name), name)
        if wrong := [kind for kind in self.turns if kind not in KINDS]:
            raise InputError(f"rounds are size and depth, separated by commas, not '{wrong[0]}'")

    @property
    def turns(self) -> list[str]:
        """The policies to train, in order, after each was trained alone."""
        named = [] if self.rounds in ("", "none") or self.train != "both" else self.rounds.split(",")
        return [kind.strip() for kind in named]

    @property
    def stages(self) -> list[Stage]:
        alone = KINDS if self.train == "both" else (self.train,)
        kinds = [*((kind, True) for kind in alone), *((kind, False) for kind in self.turns)]
        return [Stage(place, kind, first) for place, (kind, first) in enumerate(kinds)]

    def network(self, kind: str) -> dict[str, list[int]]:
        """Hidden layers of the policy and of its critic."""
        layers, critic = f"{kind}_layers", f"{kind}_critic"
        return {"pi": _widths(getattr(self, layers), layers), "vf": _widths(getattr(self, critic), critic)}

    def steps(self, kind: str) -> int:
        return self.size_steps if kind == "size" else self.depth_steps

    def gamma(self, kind: str) -> float:
        return self.size_gamma if kind == "size" else self.depth_gamma

    def rate_at(self, left: float) -> float:
        """The learning rate when a share of the steps is left: linear warm-up, then linear decay to 0."""
        done = 1 - left
        if done < self.warm_up:
            return self.rate * done / self.warm_up
        return self.rate * left / max(1 - self.warm_up, 1e-9)


def _widths(text: str, name: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"{name} must be widths separated by commas, e.g. 1024,256, not '{text}'")
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
    """A recipe by name, with the user's settings applied."""
    if recipe not in RECIPES:
        raise InputError(f"there is no recipe '{recipe}'; choose from {', '.join(RECIPES)}")
    return options.build(Config, {**RECIPES[recipe], **settings}, "train ltd")


def check_extra() -> None:
    """Raise an error if stable-baselines3 is missing."""
    try:
        import stable_baselines3  # noqa: F401
    except ImportError:
        raise InputError("training policies needs stable-baselines3; run: pip install windfall[rl]") from None
