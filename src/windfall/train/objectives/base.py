"""The interface of a training objective: from a head and the teacher's outputs to a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from windfall.core import options
from windfall.train.losses import Report
from windfall.train.teacher import Teacher, TeacherOutput


@dataclass
class Objective:
    """Subclasses are dataclasses; their fields, made with `option`, are the settings of the objective."""

    drafter: ClassVar[str] = "head"  # the drafter that uses its heads

    def __post_init__(self) -> None:
        options.check(self)

    def new_head(self, target: Any, shape: dict[str, Any]) -> nn.Module:
        """An untrained head for this target; `shape` holds the user's choices."""
        raise NotImplementedError

    def report(self, head: Any, outputs: TeacherOutput, teacher: Teacher, progress: float) -> Report:
        """The loss of a batch; `progress` runs from 0 to 1 over the training."""
        raise NotImplementedError
