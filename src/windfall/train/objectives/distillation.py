"""A smaller language model learns the target's distribution (Hinton et al. 2015; for drafters: DistillSpec, Zhou et al.
2024), word by word over what the target wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.train.losses import Vocabularies, distil
from windfall.train.objectives.base import Objective, Report
from windfall.train.shards import Batch
from windfall.train.teacher import Lesson, Teacher


@dataclass
class Distillation(Objective):
    """Cross-entropy against the target's distribution over its whole vocabulary."""

    everywhere: bool = option(False, "learn from the prompts too, not only from what the target wrote")

    def report(self, head: Any, lesson: Lesson, teacher: Teacher, progress: float) -> Report:
        rows = self.rows(lesson.batch)
        states = head(lesson.batch.tokens[:, :-1])[rows][None]  # [1, N, H]
        weights = states.new_full(states.shape[:2], 1 / max(1, states.shape[1]), dtype=torch.float32)
        output = teacher.output
        vocabularies = Vocabularies(head.vocabulary, output.weight, None, output.bias)
        return Report(*distil(states, lesson.final[:, :-1][rows], vocabularies, weights))

    def rows(self, batch: Batch) -> Tensor:
        """[B, L - 1] bool, by r: whether the guess of x[r+1] counts."""
        if not self.everywhere or batch.lengths is None:
            return batch.answer[:, 1:]
        places = torch.arange(1, batch.tokens.shape[1], device=batch.tokens.device)
        return places < batch.lengths[:, None]
