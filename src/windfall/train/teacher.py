"""The target as a teacher: its states over whole texts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from windfall.heads.base import FeatureHead
from windfall.model.hidden_states import with_states
from windfall.train.losses import Bend, Vocabularies
from windfall.train.shards import Batch


class Lesson(NamedTuple):
    """A batch and what the target makes of it."""

    batch: Batch
    features: Tensor  # [B, L, taps * Ht], what the head reads
    final: Tensor  # [B, L, Ht], what the target's vocabulary head reads


class Teacher:
    """A frozen target."""

    def __init__(self, model: Any, taps: tuple[int, ...]):
        self.model, self.taps = model, taps
        self.output = model.get_output_embeddings()
        self.bend = Bend.of(model.config.get_text_config())

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.output.weight.dtype
        return dtype

    def compile(self) -> None:
        """Layer by layer: they are alike, so that one is compiled for all. Whole where transformers names no layers."""
        alike = set(self.model._no_split_modules or ())
        layers = [module for module in self.model.modules() if type(module).__name__ in alike]
        for part in layers or [self.model.base_model]:
            part.compile(dynamic=True)

    @torch.no_grad()
    def teach(self, batch: Batch) -> Lesson:
        """One causal forward; padding comes last, so no real token sees any."""
        given = {"input_ids": batch.tokens, "use_cache": False}
        outputs, features = with_states(self.model.base_model, self.model, self.taps, **given)
        final = outputs.last_hidden_state
        return Lesson(batch, final[..., :0] if features is None else features, final)

    def vocabularies(self, head: FeatureHead) -> Vocabularies:
        own = head.vocabulary, self.output.weight, head.draft_tokens
        return Vocabularies(*own, getattr(self.output, "bias", None), head.vocabulary_bias, self.bend)
