"""EAGLE-1 (Li et al. 2024), the head that EAGLE-2, HASS and TALF train too.

`fc` combines embedding and last feature; one decoder layer predicts the next feature, which the target's vocabulary
head reads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windfall.heads.base import FeatureHead, Guess, HeadConfig
from windfall.heads.layers import DecoderLayer, Memory


class Eagle(FeatureHead):
    """Flags: fc_bias, own_embedding, own_vocabulary."""

    def __init__(self, config: HeadConfig):
        super().__init__(config)
        width = config.layer.hidden_size
        self.fc = nn.Linear(2 * width, width, config.flag("fc_bias"))
        self.layers = nn.ModuleList(
            DecoderLayer(config.layer, i, input_norm=i > 0) for i in range(config.layer.num_hidden_layers)
        )

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, memory: Memory) -> Guess:
        turn = self.rotary(positions, hidden.dtype)
        hidden = self.fc(torch.cat([self.embed(tokens), hidden], -1))
        for layer in self.layers:
            hidden = layer(hidden, turn, memory)
        return Guess(hidden, hidden)
