"""Medusa-1 (Cai et al. 2024): head i is trained with the target's distribution i + 1 tokens further ahead."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from windfall.core.errors import InputError
from windfall.core.options import option
from windfall.heads.medusa import new_medusa
from windfall.train.coupling import TextRows
from windfall.train.losses import Report, Vocabularies, distill, label_chances, token_cross_entropy
from windfall.train.new_heads import new_parallel
from windfall.train.objectives.base import Distilling
from windfall.train.row_losses import draft_indices
from windfall.train.step_weights import HELP, weigh_steps
from windfall.train.teacher import Teacher, TeacherOutput
from windfall.train.unroll import by_row, text_rows


@dataclass
class HeadsLoss(Distilling):
    """What Medusa and Hydra share: the sum of the heads' losses."""

    heads: int = option(4, "number of heads of a new drafter, each one token further ahead", low=1, high=16)
    own_vocabulary: bool = option(False, "new heads train a vocabulary each, initialised with the target's")
    soft: float = option(1.0, "weight of `loss`, the distance from the target's distribution", low=0)
    hard: float = option(0.0, "weight of the cross-entropy with the text's own tokens", low=0)
    decay: float = option(1.0, "weight of a head relative to the head before it; Medusa's paper: 0.8", low=0, high=1)
    step_weights: str = option("decay", HELP, choices=("decay", "exp", "dpace"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.soft + self.hard:
            raise InputError("soft and hard are both 0, so there is nothing to learn; set one above 0")

    def states(self, head: Any, outputs: TeacherOutput) -> Tensor:
        """[heads, N, H] by answer row r: head i predicts x[r+1] from the feature of position r-1-i."""
        raise NotImplementedError

    def report(self, head: Any, outputs: TeacherOutput, teacher: Teacher, progress: float) -> Report:
        places, states = outputs.batch.rows.places, self.states(head, outputs)
        valid = places > torch.arange(len(states), device=places.device)[:, None]
        chances = partial(_chances, head, states, text_rows(outputs), teacher)
        weights = weigh_steps(self.step_weights, valid, outputs, chances, self.decay, head.training)
        weights = weights / max(1, len(places))
        reports = [self._report(head, i, own, outputs, teacher, weights[i]) for i, own in enumerate(states)]
        losses, steps, hits, _ = zip(*reports, strict=True)
        return Report(torch.stack(losses).sum(), torch.cat(steps), torch.cat(hits))

    def _report(
        self, head: Any, i: int, states: Tensor, outputs: TeacherOutput, teacher: Teacher, weights: Tensor
    ) -> Report:
        """The loss of one head. The other figures are those of the soft labels, if they have a weight."""
        rows, reports = outputs.batch.rows, list[Report]()
        if self.soft:
            own, vocabularies = _with_vocabulary(head, i, states, teacher)
            final, goal = outputs.final[rows], self.goal(head, text_rows(outputs))
            reports.append(distill(own[None], final, vocabularies, (weights * self.soft)[None], goal=goal))
        if self.hard:
            tokens = outputs.batch.tokens[:, 1:][rows]
            if head.draft_tokens is not None:
                tokens = draft_indices(head.draft_tokens, teacher.output.weight.shape[0])[tokens]
            logits = partial(head.head_logits, i)
            reports.append(token_cross_entropy(logits, states, tokens, weights * self.hard))
        return reports[0]._replace(loss=torch.stack([own.loss for own in reports]).sum())


def _with_vocabulary(head: Any, i: int, states: Tensor, teacher: Teacher) -> tuple[Tensor, Vocabularies]:
    """One head's states [N, H] and vocabulary. A trained bias becomes one more column of the vocabulary."""
    given = teacher.vocabularies(head)
    if head.vocabularies is not None:
        own, biases = head.vocabularies[i], head.vocabulary_biases
        if biases is not None:
            own = torch.cat([own, biases[i][:, None]], 1)
            states = torch.cat([states, torch.ones_like(states[:, :1])], 1)
        given = given._replace(draft=own, draft_bias=None)
    return states, given


def _chances(head: Any, states: Tensor, text: TextRows, teacher: Teacher) -> Tensor:
    """The heads' probabilities of the text [heads, N]."""
    given = (_with_vocabulary(head, i, own, teacher) for i, own in enumerate(states))
    return torch.cat([label_chances(own[None], vocabularies, text.tokens) for own, vocabularies in given])


@dataclass
class MedusaLoss(HeadsLoss):
    """Heads that read the frozen target's last state only."""

    drafter: ClassVar[str] = "medusa"

    blocks: int = option(1, "residual blocks of a new head", low=1)

    def new_head(self, target: Any, shape: dict[str, Any]) -> Any:
        shared = not self.own_vocabulary
        return new_parallel(new_medusa, target, shape, heads=self.heads, blocks=self.blocks, shared_vocabulary=shared)

    def states(self, head: Any, outputs: TeacherOutput) -> Tensor:
        features = outputs.features[:, :-1]
        found = head.states(features.flatten(0, 1)).unflatten(1, features.shape[:2])
        return by_row(list(found), outputs)
