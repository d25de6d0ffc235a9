"""Hydra (Ankner et al. 2024): heads that also read the tokens drafted so far.

Hydra++ adds a decoder layer (`Prefix`) over the target's features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from windfall.heads.layers import DecoderLayer, Memory, RMSNorm
from windfall.heads.medusa import Heads, HeadsConfig, plain_layer


class Hydra(Heads):
    """Head i predicts x[t+2+i] from the feature of position t and the tokens x[t+1] … x[t+1+i].

    Flags: shared_vocabulary, vocabulary_bias, prefix (Hydra++). A new head predicts what the target does.
    """

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        width = config.layer.hidden_size
        self.mlps = nn.ModuleList(Grounded(width, i + 1, config.blocks) for i in range(config.heads))
        self.prefix = Prefix(config.layer) if config.flag("prefix") else None
        self.dropout = nn.Dropout(0.0)  # for training, before every block and vocabulary

    def contexts(self, features: Tensor, positions: Tensor, memory: Memory) -> Tensor:
        """The input of the heads: the target's features [B, n, H], or the prefix layer's outputs for them."""
        if self.prefix is None:
            return features
        found: Tensor = self.prefix(features, self.rotary(positions, features.dtype), memory)
        return found

    def states(self, head: int, context: Tensor, tokens: Tensor) -> Tensor:
        """The states [.., H] of one head, for contexts [.., H] and head + 1 tokens [.., head + 1] each."""
        embedded = self.embed(tokens).flatten(-2)  # [.., (head + 1) * H]
        state: Tensor = self.mlps[head](torch.cat([context, embedded], -1), self.dropout)
        dropped: Tensor = self.dropout(state)
        return dropped

    def slots(self) -> dict[str, Tensor]:
        found = super().slots()
        for i, mlp in enumerate(self.mlps):
            for name, parameter in mlp.named_parameters():
                kind, _, rest = name.partition(".")
                found[f"{kind}.{i}.{rest}"] = parameter.data
        prefix = [] if self.prefix is None else self.prefix.named_parameters()
        return found | {f"prefix.{name}": parameter.data for name, parameter in prefix}


class Grounded(nn.Module):
    """Residual blocks; the first reads the context and the embeddings of some tokens, with a learned residual."""

    def __init__(self, width: int, tokens: int, blocks: int):
        super().__init__()
        wide = width * (tokens + 1)
        self.blocks = nn.ModuleList(nn.Linear(width if place else wide, width) for place in range(blocks))
        self.residual = nn.Linear(wide, width)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
            self.residual.weight[:, :width] = torch.eye(width)

    def forward(self, x: Tensor, dropout: nn.Module) -> Tensor:
        x = dropout(x)
        x = self.residual(x) + F.silu(self.blocks[0](x))
        for block in self.blocks[1:]:
            x = dropout(x)
            x = x + F.silu(block(x))
        return x


class Prefix(nn.Module):
    """A decoder layer over the features of all committed tokens, and a norm."""

    def __init__(self, layer: LlamaConfig):
        super().__init__()
        self.layer = DecoderLayer(layer, 0)
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)

    def forward(self, features: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        out: Tensor = self.norm(self.layer(features, turn, memory))
        return out


def new_hydra(
    model: Any,
    heads: int = 4,
    blocks: int = 1,
    prefix: bool = False,
    shared_vocabulary: bool = True,
    draft_tokens: Tensor | None = None,
) -> Hydra:
    """Untrained heads for a transformers model; Hydra++ has 4 blocks and a prefix layer."""
    vocabulary = model.get_output_embeddings().weight  # [V, H]
    width = vocabulary.shape[1]
    config = HeadsConfig(
        "hydra",
        prefix_layer(model.config.get_text_config()) if prefix else plain_layer(width),
        width,
        taps=(-1,),
        vocab_size=len(vocabulary),
        draft_vocab_size=None if draft_tokens is None else len(draft_tokens),
        flags={"shared_vocabulary": shared_vocabulary, "vocabulary_bias": not shared_vocabulary, "prefix": prefix},
        heads=heads,
        blocks=blocks,
    )
    head = Hydra(config)
    head.draft_tokens = draft_tokens
    head.copy_vocabulary(vocabulary)
    if head.prefix is not None:
        _start_as_identity(head.prefix, getattr(model.base_model, "norm", None))
    return head


def _start_as_identity(prefix: Prefix, last: nn.Module | None) -> None:
    """Make the layer add nothing, and its norm scale features like the target's last norm."""
    with torch.no_grad():
        prefix.layer.self_attn.o_proj.weight.zero_()
        prefix.layer.mlp.down_proj.weight.zero_()
        scale = getattr(last, "weight", torch.ones(1)).detach().float()
        prefix.norm.weight.fill_(float(scale.pow(2).mean().sqrt()))


def prefix_layer(target: Any) -> LlamaConfig:
    """One decoder layer of the target's sizes, as in the release."""
    heads, width = target.num_attention_heads, target.hidden_size
    names = ("hidden_act", "rms_norm_eps", "max_position_embeddings", "head_dim")
    known = {name: found for name in names if (found := getattr(target, name, None)) is not None}
    rope = getattr(target, "rope_parameters", None) or {}
    if "rope_type" in rope:  # the same for all layers; `Prefix` rotates whole heads
        known["rope_parameters"] = {name: each for name, each in rope.items() if name != "partial_rotary_factor"}
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=getattr(target, "intermediate_size", None) or 4 * width,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        num_hidden_layers=1,
        **known,
    )
