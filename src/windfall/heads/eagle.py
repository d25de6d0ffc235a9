"""EAGLE-1 (Li et al. 2024), which EAGLE-2, HASS and TALF train too: embedding and last feature through `fc`, one layer,
and out comes the next feature, in the space that the target's vocabulary head reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windfall.heads.base import FeatureHead, Guess, HeadConfig
from windfall.heads.layers import MLP, Attention, Memory, RMSNorm


class Eagle(FeatureHead):
    """Flags: fc_bias, own_embedding, own_vocabulary."""

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        width = config.layer.hidden_size
        self.fc = nn.Linear(2 * width, width, config.flag("fc_bias"))
        self.layers = nn.ModuleList(Unnormed(config, i) for i in range(config.layer.num_hidden_layers))

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, memory: Memory) -> Guess:
        turn = self.rotary(positions, hidden.dtype)
        hidden = self.fc(torch.cat([self.embed(tokens), hidden], -1))
        for layer in self.layers:
            hidden = layer(hidden, turn, memory)
        return Guess(hidden, hidden)


class Unnormed(nn.Module):
    """A decoder layer; the first has no norm before its attention."""

    def __init__(self, config: HeadConfig, place: int):
        super().__init__()
        layer = config.layer
        self.input_layernorm = RMSNorm(layer.hidden_size, layer.rms_norm_eps) if place else None
        self.self_attn = Attention(layer, place, layer.hidden_size)
        self.post_attention_layernorm = RMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.mlp = MLP(layer)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        normed = hidden if self.input_layernorm is None else self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, turn, memory)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out
