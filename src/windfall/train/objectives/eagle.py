"""EAGLE's loss (Li et al. 2024): one pass over the target's features. The head's feature should equal the target's next
one and lead to the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.core.errors import InputError
from windfall.core.options import option
from windfall.heads.base import FeatureHead, Guess
from windfall.train.batch import send
from windfall.train.losses import Labels, Report, distill, label_chances
from windfall.train.new_heads import new_eagle
from windfall.train.objectives.base import Distilling
from windfall.train.step_weights import weigh_steps
from windfall.train.teacher import Teacher, TeacherOutput
from windfall.train.unroll import aligned, by_row, text_rows, unroll

TOP_TOKENS = 10  # the target's likeliest tokens, in the `top` part of the loss


class LossWeights(NamedTuple):
    """The weights of the parts of the loss."""

    feature: float  # smooth L1 between features
    ce: float  # distance from the target's distribution, by default the cross-entropy
    top: float  # cross-entropy with the target's likeliest tokens only


WEIGHTS = {"release": LossWeights(1.0, 0.1, 1.0), "salf": LossWeights(1.0, 10.0, 10.0)}


@dataclass
class EagleLoss(Distilling):
    """A feature loss and a loss between distributions, averaged over the rows of the target's own tokens."""

    weights: str = option("release", "weights of EAGLE's code, or of the SALF paper", choices=tuple(WEIGHTS))
    feature: float | None = option(None, "weight of the feature loss, instead of the one in `weights`", low=0)
    ce: float | None = option(None, "weight of `loss`, instead of the one in `weights`", low=0)
    noise: float = option(0.1, "the target's features get uniform noise up to this times 512 / length", low=0)

    def new_head(self, target: Any, shape: dict[str, Any]) -> FeatureHead:
        return new_eagle(target, shape)

    def report(self, head: Any, outputs: TeacherOutput, teacher: Teacher, progress: float) -> Report:
        noisy = add_noise(outputs, self.noise) if head.training and self.noise else outputs
        guesses = self.guesses(head, noisy, progress)
        states, final, valid = aligned(head, guesses, outputs)
        vocabularies, text, weights = teacher.vocabularies(head), text_rows(outputs), self.loss_weights()
        chances = partial(label_chances, states, vocabularies, text.tokens)
        row_weights = self.row_weights(head, guesses, outputs, valid)
        row_weights = row_weights * weigh_steps(self.kind_of_steps, valid, outputs, chances, training=head.training)
        unit = weights.ce + weights.top or 1.0
        labels = Labels(weights.ce / unit, weights.top / unit, TOP_TOKENS)
        report = distill(states, final, vocabularies, row_weights * unit, labels, self.goal(head, text))
        if not weights.feature:
            return report
        features = feature_loss(by_row([guess.recycled for guess in guesses], outputs), final, row_weights)
        return report._replace(loss=report.loss + weights.feature * features)

    @property
    def kind_of_steps(self) -> str:
        """How steps are weighted, see `weigh_steps`; EAGLE has one step only."""
        return "equal"

    def loss_weights(self) -> LossWeights:
        preset = WEIGHTS[self.weights]
        feature = preset.feature if self.feature is None else self.feature
        return LossWeights(feature, preset.ce if self.ce is None else self.ce, self.top_weight(preset))

    def top_weight(self, preset: LossWeights) -> float:
        """EAGLE has no loss on the likeliest tokens; subclasses add one."""
        return 0.0

    def guesses(self, head: FeatureHead, outputs: TeacherOutput, progress: float) -> list[Guess]:
        return unroll(head, outputs, 1)

    def row_weights(self, head: FeatureHead, guesses: list[Guess], outputs: TeacherOutput, valid: Tensor) -> Tensor:
        """[S, N], of the valid rows of each pass."""
        return valid.float() / max(1, valid.shape[1])


def feature_loss(own: Tensor, final: Tensor, weights: Tensor) -> Tensor:
    """Smooth L1 of features [S, N, H] against the target's [N, H], mean over the width, weighted by row [S, N]."""
    width = own.shape[-1]
    if width != final.shape[-1]:
        raise InputError(f"this head's features have width {width}, the target's {final.shape[-1]}; set feature=0")
    losses = F.smooth_l1_loss(own.float(), final.float().expand_as(own), reduction="none").mean(-1)
    return (losses * weights).sum()


def add_noise(outputs: TeacherOutput, noise: float) -> TeacherOutput:
    """Add uniform noise to the head's input, stronger for short texts. The target's final states stay unchanged."""
    batch, features = outputs.batch, outputs.features
    lengths = torch.full((len(features),), features.shape[1]) if batch.lengths is None else batch.lengths
    generator = torch.Generator(features.device).manual_seed(int(torch.randint(2**62, ())))
    draws = torch.rand(features.shape, device=features.device, generator=generator)
    scale = 2 * noise * 512 / send(lengths, features.device)[:, None, None]
    return outputs._replace(features=features + ((draws - 0.5) * scale).to(features.dtype))
