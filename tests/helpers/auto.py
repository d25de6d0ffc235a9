"""Cost curves and a pair of policy and drafter for `auto`."""

from __future__ import annotations

import torch

from helpers.table import random_table
from windfall.costs.curves import Costs

CURVES = {
    "flat, cheap head": Costs.simple(0.08, (1, 64), (1.0, 1.4)),
    "flat, dear drafter": Costs.simple(0.35, (1, 64), (1.0, 1.4)),
    "steps": Costs.simple(0.01, (1, 2, 4, 8, 16, 32, 64), (40.6, 49.8, 67, 85, 87, 115, 174), 0.5),
    "linear": Costs.simple(0.02, (1, 64), (1.0, 20.0)),
}


def pair(sharpness: float, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A target and a drafter that is less sure, and wrong in places."""
    target = random_table(24, seed, sharpness)
    noise = torch.randn(24, 24, generator=torch.Generator().manual_seed(seed + 4))
    return target, torch.softmax(0.8 * target.log() + 0.6 * noise, -1)
