"""EAGLE-3 (Li et al. 2025).

`fc` fuses several of the target's hidden states; one decoder layer reads the concatenated embedding and feature. The
head has its own norm and often its own vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windfall.heads.base import FeatureHead, Guess, HeadConfig
from windfall.heads.layers import MLP, Attention, DecoderLayer, Memory, RMSNorm


class Eagle3(FeatureHead):
    """Flags: fc_norm (each tap is normed before `fc`), norm_before_fc (all taps together), norm_output (the recycled
    feature is the normed one), norm_before_residual (the residual is the normed one), final_state (the head reads only
    the target's final state, without `fc`), fc_bias, own_vocabulary, own_embedding."""

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        layer, taps = config.layer, len(config.taps)
        width, eps = layer.hidden_size, layer.rms_norm_eps
        if config.flag("fc_norm"):
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden, eps) for _ in range(taps))
        if config.flag("norm_before_fc"):
            self.input_norm = RMSNorm(taps * config.target_hidden, eps)
        if not config.flag("final_state"):
            self.fc = nn.Linear(taps * config.target_hidden, width, config.flag("fc_bias"))
        self.layers = nn.ModuleList(
            [ConcatLayer(config), *(DecoderLayer(layer, i) for i in range(1, layer.num_hidden_layers))]
        )
        self.norm = RMSNorm(width, eps)

    def fuse(self, features: Tensor) -> Tensor:
        if self.config.flag("fc_norm"):
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        if self.config.flag("norm_before_fc"):
            features = self.input_norm(features)
        if self.config.flag("final_state"):
            return features
        fused: Tensor = self.fc(features)
        return fused

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, memory: Memory) -> Guess:
        embedded, turn = self.embed(tokens), self.rotary(positions, hidden.dtype)
        hidden = self.layers[0](embedded, hidden, turn, memory)
        for layer in self.layers[1:]:
            hidden = layer(hidden, turn, memory)
        return Guess(hidden, self.norm(hidden) if self.config.flag("norm_output") else hidden)

    def normed(self, state: Tensor) -> Tensor:
        normed: Tensor = self.norm(state)
        return normed


class ConcatLayer(nn.Module):
    """A decoder layer whose attention reads the concatenated embedding and feature."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        layer, eps = config.layer, config.layer.rms_norm_eps
        self.normed_residual = config.flag("norm_before_residual")
        self.input_layernorm = RMSNorm(layer.hidden_size, eps)  # of the embedding
        self.hidden_norm = RMSNorm(layer.hidden_size, eps)
        self.self_attn = Attention(layer, 0, 2 * layer.hidden_size)
        self.post_attention_layernorm = RMSNorm(layer.hidden_size, eps)
        self.mlp = MLP(layer)

    def forward(self, embedded: Tensor, hidden: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        normed = self.hidden_norm(hidden)
        hidden = normed if self.normed_residual else hidden
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        hidden = hidden + self.self_attn(both, turn, memory)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out
