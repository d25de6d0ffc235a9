"""The training recipe of heads and small models: length, batches, learning rate. It imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.core import options
from windfall.core.errors import InputError
from windfall.core.options import option


@dataclass(frozen=True)
class Recipe:
    """The length is given in `steps` (a resumed training has the same losses) or in `minutes` of wall-clock time."""

    steps: int | None = option(None, "number of optimizer steps; give either steps or minutes", low=1)
    minutes: float | None = option(None, "minutes of training; the learning rate depends on the elapsed time", low=0.01)
    batch_tokens: int = option(16384, "tokens of a forward pass, padding included", low=16)
    accumulate: int = option(1, "forward passes whose gradients are averaged into one step", low=1)
    max_length: int = option(1024, "tokens at which longer texts are cut", low=8)
    optimizer: str = option("adamw", "adamw, or muon (for matrices; AdamW for the rest)", choices=("adamw", "muon"))
    rate: float = option(1e-3, "highest learning rate", low=0)
    warm_up: float = option(0.03, "share of the training in which the learning rate rises", low=0, high=1)
    last_rate: float = option(0.02, "final learning rate, as a share of the highest (cosine schedule)", low=0, high=1)
    decay: float = option(0.01, "weight decay", low=0)
    clip: float = option(1.0, "largest gradient norm; 0: no clipping", low=0)
    seed: int = option(0, "seed of the batches and of a new head's weights")
    validate_every: int = option(500, "steps between validations on held-out texts", low=1)
    validation_batches: int = option(16, "forward passes of a validation", low=1)
    compile: bool = option(False, "compile the target's layers; faster on a GPU, after some seconds of compiling")
    save_minutes: float = option(3.0, "minutes between checkpoints", low=0)

    def __post_init__(self) -> None:
        options.check(self)
        if bool(self.steps) == bool(self.minutes):
            raise InputError("give the length of the training: either steps or minutes")

    def progress(self, step: int, seconds: float) -> float:
        """From 0 to 1."""
        done = step / self.steps if self.steps else seconds / 60 / (self.minutes or 1)
        return min(done, 1.0)

    def rate_at(self, progress: float) -> float:
        """Linear warm-up, then a cosine."""
        if progress < self.warm_up:
            return self.rate * min(1.0, (progress + 1e-3) / self.warm_up)
        late = (progress - self.warm_up) / max(1 - self.warm_up, 1e-9)
        return self.rate * (self.last_rate + (1 - self.last_rate) * (1 + math.cos(math.pi * late)) / 2)
