"""Distillation of the target into a smaller language model (Hinton et al. 2015; DistillSpec, Zhou et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.train.batch import Batch, Rows, send
from windfall.train.coupling import TextRows
from windfall.train.losses import Report, Vocabularies, distill
from windfall.train.objectives.base import Distilling
from windfall.train.teacher import Teacher, TeacherOutput


@dataclass
class Distillation(Distilling):
    """The distance from the target's distribution over its whole vocabulary, at the tokens it generated."""

    everywhere: bool = option(False, "train on the prompts too, not only on what the target generated")

    def report(self, head: Any, outputs: TeacherOutput, teacher: Teacher, progress: float) -> Report:
        rows = Rows.where(self.counted(outputs.batch), outputs.batch.tokens.device)
        states = head(outputs.batch.tokens[:, :-1])[rows][None]  # [1, N, H]
        weights = states.new_full(states.shape[:2], 1 / max(1, states.shape[1]), dtype=torch.float32)
        vocabularies = Vocabularies(head.vocabulary, teacher.output.weight, None, teacher.output.bias)
        return distill(
            states, outputs.final[rows], vocabularies, weights, goal=self.goal(head, self.text(outputs.batch, rows))
        )

    def text(self, batch: Batch, rows: Rows) -> TextRows:
        """The text of the rows; tokens of prompts were not drawn from the target."""
        tokens = batch.tokens[:, 1:][rows]
        if batch.temperatures is None:
            return TextRows(tokens, torch.zeros_like(tokens, dtype=torch.float32))
        drawn = send(batch.answer[:, 1:], tokens.device)[rows]
        return TextRows(tokens, batch.temperatures[rows.texts] * drawn)

    def counted(self, batch: Batch) -> Tensor:
        """[B, L - 1] bool, on the host, by r: whether the prediction of x[r+1] counts."""
        if not self.everywhere or batch.lengths is None:
            return batch.answer[:, 1:]
        return torch.arange(1, batch.tokens.shape[1]) < batch.lengths[:, None]
