"""Medusa (Cai et al. 2024): independent heads on the target's last state, one for each token ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from windfall.heads.base import FeatureHead, HeadConfig


@dataclass(frozen=True)
class HeadsConfig(HeadConfig):
    """Several heads, one for each token ahead. Flags: shared_vocabulary, and those of the kinds."""

    heads: int = 4  # one for each drafted token
    blocks: int = 1  # residual blocks of a head


class Heads(FeatureHead):
    """The base of Medusa and Hydra: a vocabulary for each head, or (`shared_vocabulary`) the target's for all."""

    config: HeadsConfig

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        drafted = config.draft_vocab_size or config.vocab_size
        own, biased = not config.flag("shared_vocabulary"), config.flag("vocabulary_bias")
        shape = (config.heads, drafted, config.layer.hidden_size)
        self.vocabularies = nn.Parameter(torch.zeros(shape)) if own else None
        self.vocabulary_biases = nn.Parameter(torch.zeros(shape[:2])) if own and biased else None

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def head_logits(self, head: int, state: Tensor) -> Tensor:
        """One head's states [.., H] → [.., Vd]."""
        if self.vocabularies is None:
            return super().logits(state)
        bias = None if self.vocabulary_biases is None else self.vocabulary_biases[head]
        return F.linear(state, self.vocabularies[head], bias)

    def copy_vocabulary(self, weight: Tensor) -> None:
        """Initialise every head's own vocabulary with the target's [V, H]."""
        if self.vocabularies is not None:
            rows = weight if self.draft_tokens is None else weight[self.draft_tokens]
            self.vocabularies.data.copy_(rows.detach().expand_as(self.vocabularies))

    def slots(self) -> dict[str, Tensor]:
        """Every parameter by head, under the names that `heads.formats` translates to and from."""
        found: dict[str, Tensor] = {}
        for part, own in (("weight", self.vocabularies), ("bias", self.vocabulary_biases)):
            found |= {} if own is None else {f"vocabulary.{i}.{part}": each for i, each in enumerate(own.data)}
        return found


class Medusa(Heads):
    """Head i predicts x[t+2+i] from the feature of position t. Flags: shared_vocabulary, bias (of the blocks).

    The heads' weights are stacked, so that one product serves all heads. A new head predicts what the target does.
    """

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        heads, width = config.heads, config.layer.hidden_size
        biased = config.blocks if config.flag("bias") else 0
        self.weights = nn.ParameterList(torch.zeros(heads, width, width) for _ in range(config.blocks))
        self.biases = nn.ParameterList(torch.zeros(heads, 1, width) for _ in range(biased))

    def states(self, features: Tensor) -> Tensor:
        """Features [n, H] → [heads, n, H], the input of the vocabularies."""
        hidden = features.expand(self.config.heads, *features.shape)
        for place, weight in enumerate(self.weights):
            moved = torch.bmm(hidden, weight.mT)
            hidden = hidden + F.silu(moved + self.biases[place] if len(self.biases) else moved)
        return hidden

    def logits(self, state: Tensor) -> Tensor:
        """All heads' states [heads, n, H] → [heads, n, Vd]."""
        return super().logits(state) if self.vocabularies is None else torch.bmm(state, self.vocabularies.mT)

    def slots(self) -> dict[str, Tensor]:
        found = super().slots()
        for j, weight in enumerate(self.weights):
            found |= {f"blocks.{i}.{j}.weight": each for i, each in enumerate(weight.data)}
        for j, bias in enumerate(self.biases):
            found |= {f"blocks.{i}.{j}.bias": each for i, each in enumerate(bias.data[:, 0])}
        return found


def new_medusa(
    model: Any, heads: int = 4, blocks: int = 1, shared_vocabulary: bool = True, draft_tokens: Tensor | None = None
) -> Medusa:
    """Untrained heads for a transformers model; `draft_tokens` [Vd] is their vocabulary, if not the whole one."""
    vocabulary = model.get_output_embeddings().weight  # [V, H]
    config = HeadsConfig(
        "medusa",
        plain_layer(vocabulary.shape[1]),
        vocabulary.shape[1],
        taps=(-1,),
        vocab_size=len(vocabulary),
        draft_vocab_size=None if draft_tokens is None else len(draft_tokens),
        flags={"shared_vocabulary": shared_vocabulary, "bias": True},
        heads=heads,
        blocks=blocks,
    )
    head = Medusa(config)
    head.draft_tokens = draft_tokens
    head.copy_vocabulary(vocabulary)
    return head


def plain_layer(width: int) -> LlamaConfig:
    """The layer config of heads without a layer: only the width counts."""
    return LlamaConfig(hidden_size=width, num_attention_heads=1)
