"""GRIFFIN (Hu et al. 2025): HASS's passes, in stages, where a chain teaches no further than the head itself would have
drafted it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.heads.base import FeatureHead, Guess
from windfall.train.losses import CHUNK
from windfall.train.objectives.eagle import EagleLoss, Parts, by_row
from windfall.train.shapes import new_griffin
from windfall.train.teacher import Lesson
from windfall.train.unroll import unroll


@dataclass
class TokenAligned(EagleLoss):
    """A pass more in each stage; a column counts while the text's tokens were among the head's first choices."""

    steps: int = option(3, "stages, and passes of the last one", low=1, high=16)
    top: float = option(0.5, "weight of the ten likeliest tokens' part", low=0)
    first: int = option(3, "first choices among which the text's token must be for a chain to go on", low=1)

    def new_head(self, target: Any, shape: dict[str, Any]) -> FeatureHead:
        return new_griffin(target, shape)

    def top_weight(self, preset: Parts) -> float:
        return self.top

    def guesses(self, head: FeatureHead, lesson: Lesson, progress: float) -> list[Guess]:
        return unroll(head, lesson, min(self.steps, 1 + int(progress * self.steps)), detach=True)

    def row_weights(self, head: FeatureHead, guesses: list[Guess], lesson: Lesson, valid: Tensor) -> Tensor:
        """The mean over those rows of each pass that still count."""
        kept = valid & by_row(aligned_columns(head, guesses, lesson, self.first), lesson)
        return kept.float() / kept.sum(-1, keepdim=True).clamp(min=1)


@torch.no_grad()
def aligned_columns(head: FeatureHead, guesses: list[Guess], lesson: Lesson, first: int) -> list[Tensor]:
    """For each pass [B, columns], whether every token of the column's chain was among the head's first choices."""
    tokens = lesson.batch.tokens[:, 1:]
    kept = [torch.ones_like(tokens, dtype=torch.bool)]
    for step, guess in enumerate(guesses[:-1]):
        kept.append(kept[-1] & _chosen(head, guess.state, tokens.roll(-step - 1, 1), first))
    return kept


def _chosen(head: FeatureHead, states: Tensor, tokens: Tensor, first: int) -> Tensor:
    """Whether each token [B, n] is among the first choices of its state [B, n, H]."""
    size = max(1, CHUNK // len(head.vocabulary))
    first = min(first, len(head.vocabulary))
    parts = [head.logits(part).topk(first, -1).indices for part in torch.split(states.flatten(0, 1), size)]
    choices = torch.cat(parts).reshape(*tokens.shape, first)
    choices = choices if head.draft_tokens is None else head.draft_tokens[choices]
    return (choices == tokens[..., None]).any(-1)
