"""GRIFFIN (Hu et al. 2025): a fusion block in which the token guides the feature, then EAGLE's layer with two outputs.

One output is for the vocabulary head, the other is the feature of the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from windfall.heads.base import FeatureHead, Guess, HeadConfig
from windfall.heads.layers import MLP, Attention, Memory, RMSNorm


class Griffin(FeatureHead):
    """Flags: own_embedding, own_vocabulary. One layer; tensors have the names of the release."""

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        self.fc = Fusion(config)
        self.layers = nn.ModuleList([TwoOutputs(config)])

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, memory: Memory) -> Guess:
        turn = self.rotary(positions, hidden.dtype)
        both = self.layers[0](self.fc(self.embed(tokens), hidden), turn, memory)  # [B, n, 2H]
        return Guess(*both.chunk(2, -1))


class Fusion(nn.Module):
    """`fc` over embedding and feature, plus a feed-forward block that reads the embedding again."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        width = config.layer.hidden_size
        self.fc = nn.Linear(2 * width, width)
        self.post_attention_layernorm = RMSNorm(width, config.layer.rms_norm_eps)
        self.mlp = Guided(config)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        hidden = self.fc(torch.cat([embedded, hidden], -1))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden), embedded)
        return out


class Guided(nn.Module):
    """An ungated feed-forward block over a feature and an embedding, which share a norm."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        width, inner = config.layer.hidden_size, config.layer.intermediate_size
        self.input_layernorm = RMSNorm(width, config.layer.rms_norm_eps)
        self.up_proj = nn.Linear(2 * width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act = ACT2FN[config.layer.hidden_act]

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        both = torch.cat([self.input_layernorm(hidden), self.input_layernorm(embedded)], -1)
        out: Tensor = self.down_proj(self.act(self.up_proj(both)))
        return out


class TwoOutputs(nn.Module):
    """A decoder layer without a norm before its attention, whose feed-forward block has two outputs."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        layer = config.layer
        self.self_attn = Attention(layer, 0, layer.hidden_size)
        self.post_attention_layernorm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.mlp = MLP(layer, 2 * layer.hidden_size)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        hidden = hidden + self.self_attn(hidden, turn, memory)
        out: Tensor = torch.cat([hidden, hidden], -1) + self.mlp(self.post_attention_layernorm(hidden))
        return out
