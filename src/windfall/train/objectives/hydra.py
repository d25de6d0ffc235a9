"""Hydra (Ankner et al. 2024): Medusa's heads, which also read the drafted tokens before their own. Hydra++ has deeper
heads and a decoder layer over the target's features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.heads.hydra import new_hydra
from windfall.heads.layers import Unrolled
from windfall.train.new_heads import new_parallel
from windfall.train.objectives.medusa import HeadsLoss
from windfall.train.teacher import TeacherOutput


@dataclass
class HydraLoss(HeadsLoss):
    """Head i reads the text's tokens up to the one before its prediction."""

    drafter: ClassVar[str] = "hydra"

    plus: bool = option(False, "Hydra++: a decoder layer over the features and 4 blocks in each new head, dropout 0.2")
    blocks: int | None = option(None, "residual blocks of a new head; none: 4 for Hydra++, else 1", low=1)
    dropout: float | None = option(None, "dropout of the heads' inputs; none: 0.2 for Hydra++, else 0", low=0, high=0.9)

    def new_head(self, target: Any, shape: dict[str, Any]) -> Any:
        blocks = self.blocks or (4 if self.plus else 1)
        options = {"blocks": blocks, "prefix": self.plus, "shared_vocabulary": not self.own_vocabulary}
        return new_parallel(new_hydra, target, shape, heads=self.heads, **options)

    def states(self, head: Any, outputs: TeacherOutput) -> Tensor:
        head.dropout.p = (0.2 if self.plus else 0.0) if self.dropout is None else self.dropout
        tokens, features, rows = outputs.batch.tokens[:, 1:], outputs.features[:, :-1], outputs.batch.rows
        memory, columns = Unrolled(), features.shape[1]
        memory.mask = torch.ones(1, columns, columns, dtype=torch.bool, device=features.device).tril()
        contexts = head.contexts(features, torch.arange(columns, device=features.device)[None], memory)
        states = []
        for i in range(head.config.heads):
            path = torch.stack([tokens.roll(1 + i - j, 1)[rows] for j in range(i + 1)], -1)  # [N, i + 1]
            states.append(head.states(i, contexts.roll(1 + i, 1)[rows], path))
        return torch.stack(states)
