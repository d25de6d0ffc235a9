"""Options of recording cycles for a classifier and of fitting it. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windfall.core import options
from windfall.core.options import option


@dataclass(frozen=True)
class Recording:
    """The beam whose cycles are recorded, and how the texts are generated."""

    depth: int = option(12, "draft passes of a recorded cycle", low=1)
    k: int = option(10, "beam width, and children of a node", low=1)
    nodes: int = option(60, "rows of the verify pass, including the root", low=2)
    max_new_tokens: int = option(128, "length of an answer", low=1)
    temperature: float = option(0.0, "0 is greedy", low=0)

    def __post_init__(self) -> None:
        options.check(self)

    def sampling(self, seed: int) -> dict[str, Any]:
        return {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature, "seed": seed}


@dataclass(frozen=True)
class Fitting:
    """How a classifier is fitted. The defaults are those of the LTD paper, where it gives any."""

    hidden: int | None = option(None, "hidden units; none: LTD's (disco 128, specdecpp 1024, c2t 64)", low=1)
    epochs: int | None = option(None, "passes over the samples; none: LTD's (disco 50, specdecpp 5, c2t 50)", low=1)
    rate: float = option(1e-4, "learning rate of AdamW", low=0)
    decay: float = option(0.01, "weight decay; not given in LTD", low=0)
    batch: int = option(32, "samples of a step; not given in LTD", low=1)
    unbalanced: bool = option(False, "use all samples, not equally many accepted and rejected ones")
    mismatch: float = option(1.0, "weight of rejected samples (SpecDec++'s code: 6, unbalanced)", low=0)
    entropy: bool = option(False, "c2t: use the entropy as an input too; LTD does not")
    held_out: float = option(0.2, "share of the prompts kept for validation", low=0.01, high=0.9)
    seed: int = option(0, "seed of the texts, of the choice of samples and of the network")

    def __post_init__(self) -> None:
        options.check(self)
