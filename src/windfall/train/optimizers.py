"""The optimizers of a training, under one rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windfall.train.recipe import Recipe

BY_TOKEN = ("embed_tokens.weight", "lm_head.weight", "own_embedding", "own_vocabulary")  # a row for each token


class Optimizers:
    """One optimizer, or Muon for matrices inside layers and AdamW for the rest, under one rate."""

    def __init__(self, module: nn.Module, recipe: Recipe):
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        learning = list(named.values())
        wide = [name for name, p in named.items() if p.dim() == 2 and not name.endswith(BY_TOKEN)]
        matrices = [named[name] for name in wide if recipe.optimizer == "muon"]
        others = [p for p in learning if not any(p is m for m in matrices)]
        self.parameters, self.clip = learning, recipe.clip
        fused = {"fused": True} if learning[0].is_cuda else {}
        self.parts: list[Any] = []
        if matrices:
            kind = torch.optim.Muon
            self.parts.append(kind(matrices, weight_decay=recipe.decay, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=recipe.decay, **fused))

    def step(self, rate: float) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[Any]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[Any]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
