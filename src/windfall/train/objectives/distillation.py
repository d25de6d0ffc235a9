"""Distillation of the target into a smaller language model (Hinton et al. 2015; DistillSpec, Zhou et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.train.coupling import TextRows
from windfall.train.losses import Report, Vocabularies, distill
from windfall.train.objectives.base import Distilling
from windfall.train.shards import Batch
from windfall.train.teacher import Teacher, TeacherOutput


@dataclass
class Distillation(Distilling):
    """The distance from the target's distribution over its whole vocabulary, at the tokens it generated."""

    everywhere: bool = option(False, "train on the prompts too, not only on what the target generated")

    def report(self, head: Any, outputs: TeacherOutput, teacher: Teacher, progress: float) -> Report:
        rows = self.rows(outputs.batch)
        states = head(outputs.batch.tokens[:, :-1])[rows][None]  # [1, N, H]
        weights = states.new_full(states.shape[:2], 1 / max(1, states.shape[1]), dtype=torch.float32)
        vocabularies = Vocabularies(head.vocabulary, teacher.output.weight, None, teacher.output.bias)
        return distill(
            states, outputs.final[:, :-1][rows], vocabularies, weights, goal=self.goal(head, self.text(outputs.batch))
        )

    def text(self, batch: Batch) -> TextRows:
        """The text of the rows; tokens of prompts were not drawn from the target."""
        rows, tokens = self.rows(batch), batch.tokens[:, 1:]
        if batch.temperatures is None:
            return TextRows(tokens[rows], torch.zeros_like(tokens[rows], dtype=torch.float32))
        return TextRows(tokens[rows], (batch.temperatures[:, None] * batch.answer[:, 1:])[rows])

    def rows(self, batch: Batch) -> Tensor:
        """[B, L - 1] bool, by r: whether the prediction of x[r+1] counts."""
        if not self.everywhere or batch.lengths is None:
            return batch.answer[:, 1:]
        places = torch.arange(1, batch.tokens.shape[1], device=batch.tokens.device)
        return places < batch.lengths[:, None]
