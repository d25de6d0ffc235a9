"""GRIFFIN (Hu et al. 2025): HASS's passes, in stages. A chain counts only as far as the head would have drafted it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.heads.base import FeatureHead, Guess
from windfall.train.losses import MAX_LOGITS
from windfall.train.new_heads import new_griffin
from windfall.train.objectives.eagle import EagleLoss, LossWeights
from windfall.train.step_weights import HELP
from windfall.train.teacher import TeacherOutput
from windfall.train.unroll import by_row, unroll


@dataclass
class TokenAligned(EagleLoss):
    """Each stage adds a pass. A column counts while the text's tokens are among the head's top choices."""

    steps: int = option(3, "stages, and passes of the last one", low=1, high=16)
    top: float = option(0.5, "weight of the ten likeliest tokens' loss", low=0)
    first: int = option(3, "top choices that must contain the text's token for a chain to go on", low=1)
    step_weights: str = option("equal", HELP, choices=("equal", "exp", "dpace"))

    def new_head(self, target: Any, shape: dict[str, Any]) -> FeatureHead:
        return new_griffin(target, shape)

    @property
    def kind_of_steps(self) -> str:
        return self.step_weights

    def top_weight(self, preset: LossWeights) -> float:
        return self.top

    def guesses(self, head: FeatureHead, outputs: TeacherOutput, progress: float) -> list[Guess]:
        return unroll(head, outputs, min(self.steps, 1 + int(progress * self.steps)), detach=True)

    def row_weights(self, head: FeatureHead, guesses: list[Guess], outputs: TeacherOutput, valid: Tensor) -> Tensor:
        """The mean over the rows of each pass that still count."""
        kept = valid & by_row(aligned_columns(head, guesses, outputs, self.first), outputs)
        return kept.float() / kept.sum(-1, keepdim=True).clamp(min=1)


@torch.no_grad()
def aligned_columns(head: FeatureHead, guesses: list[Guess], outputs: TeacherOutput, first: int) -> list[Tensor]:
    """For each pass [B, columns], whether every token of the column's chain was among the head's top choices."""
    tokens = outputs.batch.tokens[:, 1:]
    kept = [torch.ones_like(tokens, dtype=torch.bool)]
    for step, guess in enumerate(guesses[:-1]):
        kept.append(kept[-1] & _in_top(head, guess.state, tokens.roll(-step - 1, 1), first))
    return kept


def _in_top(head: FeatureHead, states: Tensor, tokens: Tensor, first: int) -> Tensor:
    """Whether each token [B, n] is among the `first` likeliest of its state [B, n, H]."""
    size = max(1, MAX_LOGITS // len(head.vocabulary))
    first = min(first, len(head.vocabulary))
    parts = [head.logits(part).topk(first, -1).indices for part in torch.split(states.flatten(0, 1), size)]
    choices = torch.cat(parts).reshape(*tokens.shape, first)
    choices = choices if head.draft_tokens is None else head.draft_tokens[choices]
    return (choices == tokens[..., None]).any(-1)
