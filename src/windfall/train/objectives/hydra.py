"""Hydra (Ankner et al. 2024): each head reads the tokens on the way too; Hydra++ is distilled, deeper, and has a layer
over the target's features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.heads.layers import Unrolled
from windfall.train.objectives.eagle import rows_of
from windfall.train.objectives.medusa import HeadsLoss
from windfall.train.shapes import new_hydra
from windfall.train.teacher import Lesson


@dataclass
class HydraLoss(HeadsLoss):
    """Along the text: head i is given the text's tokens up to the one before its guess."""

    drafter: ClassVar[str] = "hydra"

    plus: bool = option(False, "Hydra++: a decoder layer over the features and 4 blocks in each new head, dropout 0.2")
    blocks: int | None = option(None, "residual blocks of a new head; none: 4 for Hydra++, else 1", low=1)
    dropout: float | None = option(None, "share of what the heads read that is dropped; none: as said", low=0, high=0.9)

    def new_head(self, target: Any, shape: dict[str, Any]) -> Any:
        blocks = self.blocks or (4 if self.plus else 1)
        shared = not self.own_vocabulary
        return new_hydra(target, shape, heads=self.heads, blocks=blocks, prefix=self.plus, shared_vocabulary=shared)

    def states(self, head: Any, lesson: Lesson) -> Tensor:
        head.dropout.p = (0.2 if self.plus else 0.0) if self.dropout is None else self.dropout
        tokens, features, rows = lesson.batch.tokens[:, 1:], lesson.features[:, :-1], rows_of(lesson)
        memory, columns = Unrolled(), features.shape[1]
        memory.mask = torch.ones(1, columns, columns, dtype=torch.bool, device=features.device).tril()
        contexts = head.contexts(features, torch.arange(columns, device=features.device)[None], memory)
        states = []
        for i in range(head.config.heads):
            path = torch.stack([tokens.roll(1 + i - j, 1)[rows] for j in range(i + 1)], -1)  # [N, i + 1]
            states.append(head.states(i, contexts.roll(1 + i, 1)[rows], path))
        return torch.stack(states)
