"""The interface of a training objective: from a head and the teacher's outputs to a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from windfall.core import options
from windfall.core.errors import InputError
from windfall.core.options import option
from windfall.train.coupling import TextRows
from windfall.train.losses import Goal, Report
from windfall.train.mixtures import parse_mixture
from windfall.train.teacher import Teacher, TeacherOutput

BLOCK_SHAPE = ("block", "pair", "rank", "conv", "bidirectional")  # what only block heads have
VALIDATION_SEED = 0  # of noise in losses; the same in every validation


@dataclass
class Objective:
    """Subclasses are dataclasses; their fields, made with `option`, are the settings of the objective."""

    drafter: ClassVar[str] = "head"  # the drafter that uses its heads

    def __post_init__(self) -> None:
        options.check(self)

    def check_shape(self, shape: dict[str, Any]) -> None:
        """Refuse choices that do not suit its new heads, before a model is loaded."""
        for name in BLOCK_SHAPE:
            if shape.get(name):
                raise InputError(f"--{name} is for block heads; leave it out, or use --method block")

    def new_head(self, target: Any, shape: dict[str, Any]) -> nn.Module:
        """An untrained head for this target; `shape` holds the user's choices."""
        raise NotImplementedError

    def report(self, head: Any, outputs: TeacherOutput, teacher: Teacher, progress: float) -> Report:
        """The loss of a batch; `progress` runs from 0 to 1 over the training."""
        raise NotImplementedError


@dataclass
class Distilling(Objective):
    """An objective that compares the distributions of head and target."""

    loss: str = option("kl", "kl, tv, lk, match, coupled, or a mixture such as coupled:0.5,lk:0.5")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mixture = parse_mixture(self.loss)

    def goal(self, head: nn.Module, text: TextRows | None = None) -> Goal:
        """What `distill` should minimise; `text` are the rows of the text, None: the rows are not on a text."""
        return Goal(self.mixture, text, None if head.training else VALIDATION_SEED)
