"""Medusa-1 (Cai et al. 2024): each head is held against what the target says that many tokens ahead."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from windfall.core.errors import InputError
from windfall.core.options import option
from windfall.train.losses import distil
from windfall.train.objectives.base import Objective, Report
from windfall.train.objectives.eagle import by_row, rows_of
from windfall.train.shapes import new_medusa
from windfall.train.sparse import Judged, Sparse, judge_sparse
from windfall.train.teacher import Lesson, Teacher


@dataclass
class HeadsLoss(Objective):
    """What Medusa and Hydra share: the heads' cross-entropies, summed."""

    heads: int = option(4, "heads of new ones, each a token further ahead", low=1, high=16)
    own_vocabulary: bool = option(False, "whether new heads learn a vocabulary each, starting from the target's")
    soft: float = option(1.0, "weight of the cross-entropy with the target's distribution", low=0)
    hard: float = option(0.0, "weight of the cross-entropy with the text's own tokens", low=0)
    decay: float = option(1.0, "weight of a head over the head before it; 0.8 in Medusa's paper", low=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.soft + self.hard:
            raise InputError("give soft or hard labels a weight above 0, or there is nothing to learn")

    def states(self, head: Any, lesson: Lesson) -> Tensor:
        """[heads, N, H] by row of the text: head i guesses what row r knows from the feature of position r-1-i."""
        raise NotImplementedError

    def report(self, head: Any, lesson: Lesson, teacher: Teacher, progress: float) -> Report:
        rows, states = rows_of(lesson), self.states(head, lesson)
        places = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)[rows]
        weights = [(places > i) * self.decay**i / max(1, len(places)) for i in range(len(states))]
        told = [self._judge(head, i, own, lesson, teacher, weights[i]) for i, own in enumerate(states)]
        losses, steps, hits = (torch.stack(x) for x in zip(*told, strict=True))
        return Report(losses.sum(), steps, hits)

    def _judge(self, head: Any, i: int, states: Tensor, lesson: Lesson, teacher: Teacher, weights: Tensor) -> Judged:
        """One head's loss; what is reported of it is by soft labels, if they count."""
        rows, told = rows_of(lesson), []
        if self.soft:
            told.append(softly(head, i, states, lesson.final[:, :-1][rows], teacher, weights * self.soft))
        if self.hard:
            labels = Sparse.sure(lesson.batch.tokens[:, 1:][rows]).among(head.draft_tokens)
            told.append(judge_sparse(partial(head.head_logits, i), states, labels, weights * self.hard))
        return told[0]._replace(loss=torch.stack([own.loss for own in told]).sum())


def softly(head: Any, place: int, states: Tensor, final: Tensor, teacher: Teacher, weights: Tensor) -> Judged:
    """One head against the target's distributions; its own bias, if it has one, is read as one more feature."""
    given = teacher.vocabularies(head)
    if head.vocabularies is not None:
        own, biases = head.vocabularies[place], head.vocabulary_biases
        if biases is not None:
            own = torch.cat([own, biases[place][:, None]], 1)
            states = torch.cat([states, torch.ones_like(states[:, :1])], 1)
        given = given._replace(draft=own, draft_bias=None)
    loss, entropy, hits = distil(states[None], final, given, weights[None])
    return Judged(loss, entropy[0], hits[0])


@dataclass
class MedusaLoss(HeadsLoss):
    """A frozen target, and heads that read its last state alone."""

    drafter: ClassVar[str] = "medusa"

    blocks: int = option(1, "residual blocks of a new head", low=1)

    def new_head(self, target: Any, shape: dict[str, Any]) -> Any:
        shared = not self.own_vocabulary
        return new_medusa(target, shape, heads=self.heads, blocks=self.blocks, shared_vocabulary=shared)

    def states(self, head: Any, lesson: Lesson) -> Tensor:
        features = lesson.features[:, :-1]
        found = head.states(features.flatten(0, 1)).unflatten(1, features.shape[:2])
        return by_row(list(found), lesson)
