"""The frozen target as a teacher: its hidden states over whole texts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from windfall.heads.base import DraftHead
from windfall.model.hidden_states import with_states
from windfall.model.single_sequences import single_sequences
from windfall.train.batch import Batch
from windfall.train.losses import LogitTransform, Vocabularies


class TeacherOutput(NamedTuple):
    """A batch and the target's hidden states over it."""

    batch: Batch
    features: Tensor  # [B, L, taps * Ht]: input of the head
    final: Tensor  # [B, L, Ht]: input of the target's vocabulary head


class Teacher:
    """A frozen target and the hidden states (`taps`) that a head reads."""

    def __init__(self, model: Any, taps: tuple[int, ...]):
        self.model, self.taps = model, taps
        self.output = model.get_output_embeddings()
        self.logit_transform = LogitTransform.of(model.config.get_text_config())

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.output.weight.dtype
        return dtype

    def compile(self) -> None:
        """Compile each layer, or the whole model if transformers does not name its layer class."""
        layer_classes = set(self.model._no_split_modules or ())
        layers = [  # an engine on a CPU gives them a class derived from their own
            module
            for module in self.model.modules()
            if not layer_classes.isdisjoint(own.__name__ for own in type(module).__mro__)
        ]
        for part in layers or [self.model.base_model]:
            part.compile(dynamic=True)

    @torch.no_grad()
    def run(self, batch: Batch) -> TeacherOutput:
        """One causal forward pass. Padding is on the right, so no real token attends to it."""
        given = {"input_ids": batch.tokens, "use_cache": False}
        with single_sequences():
            outputs, features = with_states(self.model.base_model, self.model, self.taps, **given)
        final = outputs.last_hidden_state
        return TeacherOutput(batch, final[..., :0] if features is None else features, final)

    def vocabularies(self, head: DraftHead) -> Vocabularies:
        own = head.vocabulary, self.output.weight, head.draft_tokens
        return Vocabularies(*own, getattr(self.output, "bias", None), head.vocabulary_bias, self.logit_transform)
