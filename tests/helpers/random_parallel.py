"""Random Medusa and Hydra heads for tiny targets."""

from __future__ import annotations

from typing import Any

import torch

from helpers.random_heads import random_block, random_head
from helpers.tiny import VOCABULARY, tiny
from windfall import registry
from windfall.drafters.lm import LMDrafter
from windfall.heads.hydra import new_hydra
from windfall.heads.medusa import Heads, new_medusa

KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"shared_vocabulary": False},
    "medusa-shared": {"blocks": 2},
    "medusa-pruned": {"shared_vocabulary": False, "draft_tokens": 30},
    "hydra": {"blocks": 2, "shared_vocabulary": False},
    "hydra-shared": {"draft_tokens": 30},
    "hydra++": {"blocks": 4, "prefix": True, "shared_vocabulary": False},
}


def random_heads(kind: str, model: Any = None, seed: int = 0, **changes: Any) -> Heads:
    """Untrained heads with noise on top, for this model."""
    make = new_medusa if kind.startswith("medusa") else new_hydra
    shape = {"heads": 4, **KINDS[kind], **changes}
    torch.manual_seed(seed)
    if "draft_tokens" in shape:
        shape["draft_tokens"] = torch.randperm(VOCABULARY)[: shape["draft_tokens"]].sort().values
    heads = make(tiny() if model is None else model, **shape)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return heads.eval()


def some_drafter(name: str) -> Any:
    """Every drafter of the registry, with random heads where it needs some; `small` is a model, mostly wrong."""
    if name == "small":
        return LMDrafter(model=tiny(seed=1, num_hidden_layers=1))
    heads = {
        "head": random_head,
        "block": random_block,
        "medusa": lambda: random_heads("medusa"),
        "hydra": lambda: random_heads("hydra++"),
    }
    return registry.drafter(name, **({"model": heads[name]()} if name in heads else {}))
