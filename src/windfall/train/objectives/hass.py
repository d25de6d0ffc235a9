"""HASS (Zhang et al. 2025): EAGLE's loss over several passes, each from the head's own features of the pass before, and
the target's likeliest tokens once more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windfall.heads.base import FeatureHead, Guess
from windfall.heads.layers import Memory, Unrolled
from windfall.options import option
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
        running: Any = Leaking(head) if self.release_bug else head
        return unroll(running, lesson, self.steps, self.detach)


class Leaking:
    """A head whose attention leaks."""

    def __init__(self, head: FeatureHead):
        self.fuse, self._head, self._memory = head.fuse, head, Leaky()

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, memory: Memory) -> Guess:
        assert isinstance(memory, Unrolled)
        self._memory.mask = memory.mask
        guess: Guess = self._head(tokens, hidden, positions, self._memory)
        return guess


class Leaky(Unrolled):
    """A column of the text that a row must not see gets a score of 0 instead of -inf, and no say in the sum."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        assert self.mask is not None
        rows = self._rows.setdefault(layer, [])
        rows.append((keys, values))
        keys, values = (torch.cat(parts, 2) for parts in zip(*rows, strict=True))
        groups = queries.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        scores = (queries @ keys.mT / math.sqrt(queries.shape[-1])).masked_fill(~self.mask[:, None], -torch.inf)
        hidden = (queries.shape[2] - self.mask.sum(-1)).clamp(min=0).log()  # [B or 1, n]
        hidden = hidden[:, None, :, None].expand(*scores.shape[:3], 1).to(scores.dtype)
        return torch.cat([scores, hidden], -1).softmax(-1)[..., :-1] @ values
