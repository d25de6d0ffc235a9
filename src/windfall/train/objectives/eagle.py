"""EAGLE's loss (Li et al. 2024): one pass over true features; the head's own feature should be the target's next one,
and lead to the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.core.errors import InputError
from windfall.core.options import option
from windfall.heads.base import FeatureHead, Guess
from windfall.train.losses import Distilled, Labels, distil
from windfall.train.objectives.base import Objective, Report
from windfall.train.shapes import new_eagle
from windfall.train.teacher import Lesson, Teacher
from windfall.train.unroll import aligned, unroll


class Parts(NamedTuple):
    """How much each part of the loss counts."""

    feature: float  # smooth L1 between features
    ce: float  # cross-entropy with the target's distribution
    top: float  # the same over the target's likeliest tokens alone


WEIGHTS = {"release": Parts(1.0, 0.1, 1.0), "salf": Parts(1.0, 10.0, 10.0)}


@dataclass
class EagleLoss(Objective):
    """A feature loss and a cross-entropy, averaged over the rows of the target's own words."""

    weights: str = option("release", "of features and tokens: EAGLE's code, or the SALF paper", choices=tuple(WEIGHTS))
    feature: float | None = option(None, "weight of the feature loss, instead of the one in `weights`", low=0)
    ce: float | None = option(None, "weight of the cross-entropy, instead of the one in `weights`", low=0)
    noise: float = option(0.1, "true features are disturbed by up to this times 512 / length", low=0)

    def new_head(self, target: Any, shape: dict[str, Any]) -> FeatureHead:
        return new_eagle(target, shape)

    def report(self, head: Any, lesson: Lesson, teacher: Teacher, progress: float) -> Report:
        heard = disturbed(lesson, self.noise) if head.training and self.noise else lesson
        guesses = self.guesses(head, heard, progress)
        states, final, valid = aligned(head, guesses, lesson)
        weights = self.row_weights(head, guesses, lesson, valid)
        parts = self.parts()
        told = judge(states, final, teacher.vocabularies(head), weights, parts)
        loss = told.loss
        if parts.feature:
            loss = loss + parts.feature * feature_loss(by_row([g.recycled for g in guesses], lesson), final, weights)
        return Report(loss, told.steps, told.hits)

    def parts(self) -> Parts:
        preset = WEIGHTS[self.weights]
        feature = preset.feature if self.feature is None else self.feature
        return Parts(feature, preset.ce if self.ce is None else self.ce, self.top_weight(preset))

    def top_weight(self, preset: Parts) -> float:
        """EAGLE has no such part; who adds one says how much of it."""
        return 0.0

    def guesses(self, head: FeatureHead, lesson: Lesson, progress: float) -> list[Guess]:
        return unroll(head, lesson, 1)

    def row_weights(self, head: FeatureHead, guesses: list[Guess], lesson: Lesson, valid: Tensor) -> Tensor:
        """[S, N], of the valid rows of each pass."""
        return valid.float() / max(1, valid.shape[1])


def judge(states: Tensor, final: Tensor, vocabularies: Any, weights: Tensor, parts: Parts) -> Distilled:
    """Both token parts in one; what is reported of each step is their weighted mean."""
    unit = parts.ce + parts.top or 1.0
    return distil(states, final, vocabularies, weights * unit, Labels(parts.ce / unit, parts.top / unit, 10))


def feature_loss(own: Tensor, final: Tensor, weights: Tensor) -> Tensor:
    """Smooth L1 of features [S, N, H] against the target's [N, H], mean over the width, weighted by row [S, N]."""
    width = own.shape[-1]
    if width != final.shape[-1]:
        raise InputError(f"this head's features have width {width}, the target's {final.shape[-1]}; set feature=0")
    losses = F.smooth_l1_loss(own.float(), final.float().expand_as(own), reduction="none").mean(-1)
    return (losses * weights).sum()


def by_row(steps: list[Tensor], lesson: Lesson) -> Tensor:
    """Steps by column [B, columns, ..] → [S, N, ..], aligned as `unroll.aligned` aligns the states."""
    rows = rows_of(lesson)
    return torch.stack([own.roll(1 + step, 1)[rows] for step, own in enumerate(steps)])


def rows_of(lesson: Lesson) -> Tensor:
    """[B, L-1]: the rows whose next token is the target's and that have a column before them."""
    rows = lesson.batch.answer[:, 1:].clone()
    rows[:, 0] = False
    return rows


def disturbed(lesson: Lesson, noise: float) -> Lesson:
    """Uniform noise on what the head reads, stronger for short texts; the target's own states stay as they are."""
    batch, features = lesson.batch, lesson.features
    lengths = batch.lengths
    if lengths is None:
        lengths = torch.full((len(features),), features.shape[1], device=features.device)
    generator = torch.Generator(features.device).manual_seed(int(torch.randint(2**62, ())))
    draws = torch.rand(features.shape, device=features.device, generator=generator)
    scale = 2 * noise * 512 / lengths[:, None, None]
    return lesson._replace(features=features + ((draws - 0.5) * scale).to(features.dtype))
