"""The contract of a training objective: a head and a lesson in, a loss and what it learnt out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from windfall.core import options
from windfall.train.teacher import Lesson, Teacher


class Report(NamedTuple):
    """What one batch says."""

    loss: Tensor  # scalar, differentiable
    steps: Tensor  # [S] cross-entropy of each unrolled step
    hits: Tensor  # [S] top-1 agreement with the target of each step


@dataclass
class Objective:
    """Subclasses are dataclasses whose fields (made with `option`) are what a user can set."""

    drafter: ClassVar[str] = "head"  # that its heads serve

    def __post_init__(self) -> None:
        options.check(self)

    def new_head(self, target: Any, shape: dict[str, Any]) -> nn.Module:
        """An untrained head for this target; `shape` is what the user asked for."""
        raise NotImplementedError

    def report(self, head: Any, lesson: Lesson, teacher: Teacher, progress: float) -> Report:
        """The loss of a batch; `progress` runs from 0 to 1 over the training."""
        raise NotImplementedError
