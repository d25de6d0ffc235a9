"""HASS (Zhang et al. 2025): EAGLE's loss over several passes, each from the head's own features of the pass before, and
the target's likeliest tokens once more."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.heads.base import FeatureHead, Guess
from windfall.train.attention import Chains, sight_of_chains
from windfall.train.objectives.eagle import EagleLoss, Parts
from windfall.train.teacher import Lesson
from windfall.train.unroll import unroll


@dataclass
class Harmonized(EagleLoss):
    """The passes' losses are summed; no gradient runs from one pass into the features of another."""

    steps: int = option(3, "passes", low=1, high=16)
    top: float | None = option(None, "weight of the ten likeliest tokens' part, instead of the one in `weights`", low=0)
    detach: bool = option(True, "whether features count as given when they are read again")
    release_bug: bool = option(False, "hidden columns stay in the attention's denominator, as in the release")

    def top_weight(self, preset: Parts) -> float:
        return preset.top if self.top is None else self.top

    def guesses(self, head: FeatureHead, lesson: Lesson, progress: float) -> list[Guess]:
        return unroll(head, lesson, self.steps, self.detach, Leaky(head.config.windows) if self.release_bug else None)


class Leaky(Chains):
    """A column of the text that a row must not see gets a score of 0 instead of -inf, and no say in the sum."""

    def look(
        self, queries: Tensor, text: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], window: int | None
    ) -> Tensor:
        count, scale = queries.shape[2], 1 / math.sqrt(queries.shape[-1])
        groups = [1, *(queries.shape[1] // keys.shape[1] for keys, _ in own)]
        rows = [[x.repeat_interleave(n, 1) for x in pair] for n, pair in zip(groups, [text, *own], strict=True)]
        future = ~sight_of_chains(queries, len(own), window)[:, :count]
        scores = (queries @ rows[0][0].mT * scale).masked_fill(future, -torch.inf)
        chain = [(queries * keys).sum(-1, keepdim=True) * scale for keys, _ in rows[1:]]
        hidden = (future.sum(-1) - len(own)).clamp(min=0).log()[:, None].expand(*scores.shape[:3], 1).to(scores.dtype)
        chances = torch.cat([scores, *chain, hidden], -1).softmax(-1)[..., :-1]
        seen = chances[..., :count] @ rows[0][1]
        return seen + sum(chances[..., count + i, None] * values for i, (_, values) in enumerate(rows[1:]))
