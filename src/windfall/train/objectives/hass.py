"""HASS (Zhang et al. 2025): EAGLE's loss over several passes, each from the head's features of the pass before, with an
additional loss on the target's likeliest tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from windfall.core.options import option
from windfall.heads.base import FeatureHead, Guess
from windfall.train.objectives.eagle import EagleLoss, LossWeights
from windfall.train.step_weights import HELP
from windfall.train.teacher import TeacherOutput
from windfall.train.unroll import ChainMemory, chain_mask, unroll


@dataclass
class Harmonized(EagleLoss):
    """The passes' losses are summed; no gradient flows from one pass into the features of another."""

    steps: int = option(3, "passes", low=1, high=16)
    top: float | None = option(None, "weight of the ten likeliest tokens' loss, instead of the one in `weights`", low=0)
    detach: bool = option(True, "stop gradients at the features of the pass before")
    step_weights: str = option("equal", HELP, choices=("equal", "exp", "dpace"))
    release_bug: bool = option(False, "hidden columns stay in the attention's denominator, as in the released code")

    @property
    def kind_of_steps(self) -> str:
        return self.step_weights

    def top_weight(self, preset: LossWeights) -> float:
        return preset.top if self.top is None else self.top

    def guesses(self, head: FeatureHead, outputs: TeacherOutput, progress: float) -> list[Guess]:
        memory = ReleaseMemory(head.config.windows) if self.release_bug else None
        return unroll(head, outputs, self.steps, self.detach, memory)


class ReleaseMemory(ChainMemory):
    """The released code's attention: hidden columns of the text get a score of 0 instead of -inf, and no value."""

    def attention(
        self, queries: Tensor, text: tuple[Tensor, Tensor], chains: list[tuple[Tensor, Tensor]], window: int | None
    ) -> Tensor:
        count, scale = queries.shape[2], 1 / math.sqrt(queries.shape[-1])
        groups = [1, *(queries.shape[1] // keys.shape[1] for keys, _ in chains)]
        rows = [[x.repeat_interleave(n, 1) for x in pair] for n, pair in zip(groups, [text, *chains], strict=True)]
        future = ~chain_mask(queries, len(chains), window)[:, :count]
        scores = (queries @ rows[0][0].mT * scale).masked_fill(future, -torch.inf)
        own = [(queries * keys).sum(-1, keepdim=True) * scale for keys, _ in rows[1:]]
        hidden = (future.sum(-1) - len(chains)).clamp(min=0).log()[:, None]
        hidden = hidden.expand(*scores.shape[:3], 1).to(scores.dtype)
        weights = torch.cat([scores, *own, hidden], -1).softmax(-1)[..., :-1]
        seen = weights[..., :count] @ rows[0][1]
        return seen + sum(weights[..., count + i, None] * values for i, (_, values) in enumerate(rows[1:]))
