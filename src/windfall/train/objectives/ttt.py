"""EAGLE-3's training-time test (Li et al. 2025): several draft steps from the head's own features, each trained with
the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from windfall.core.options import option
from windfall.heads.eagle3 import Eagle3
from windfall.train.losses import Report, distill, label_chances
from windfall.train.new_heads import new_eagle3
from windfall.train.objectives.base import Distilling
from windfall.train.step_weights import HELP, weigh_steps
from windfall.train.teacher import Teacher, TeacherOutput
from windfall.train.unroll import aligned, text_rows, unroll


@dataclass
class TrainingTimeTest(Distilling):
    """The distance from the target's distribution, with gradients through all steps; no feature loss."""

    steps: int = option(7, "unrolled draft steps", low=1, high=16)
    first_steps: int = option(3, "unrolled steps in the first fifth of the training", low=1)
    decay: float = option(0.9, "weight of a step relative to the step before it; EAGLE-3's code: 0.8", low=0, high=1)
    step_weights: str = option("decay", HELP, choices=("decay", "exp", "dpace"))

    def new_head(self, target: Any, shape: dict[str, Any]) -> Eagle3:
        return new_eagle3(target, shape)

    def report(self, head: Any, outputs: TeacherOutput, teacher: Teacher, progress: float) -> Report:
        steps = self.steps if progress >= 0.2 else min(self.first_steps, self.steps)
        states, final, valid = aligned(head, unroll(head, outputs, steps), outputs)
        vocabularies, text = teacher.vocabularies(head), text_rows(outputs)
        chances = partial(label_chances, states, vocabularies, text.tokens)
        weights = weigh_steps(self.step_weights, valid, outputs, chances, self.decay, head.training)
        return distill(states, final, vocabularies, weights / max(1, valid.shape[1]), goal=self.goal(head, text))
