"""A table of rotary angles for all positions, so that passes need not compute them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from windfall.engine.gpu.forward import Unsupported
from windfall.heads.layers import rope_kinds
from windfall.model.decoder import longrope_positions

FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # rope types whose angles depend on the position alone
CosSin = tuple[Tensor, Tensor]
NO_ANGLES = -1  # stands for the angles of a layer that has none
Rotary = Callable[[Tensor, Tensor], CosSin]  # a tensor of the wanted dtype, positions [1, n] → cos and sin [1, n, r]


class AngleForm(Enum):
    """How a rotary module lays out the cos and sin of r / 2 angles."""

    TWICE = "twice"  # all, and then all again (Llama)
    ONCE = "once"  # without repetition (gpt-oss)
    REPEATED = "repeated"  # each twice in a row (Cohere)


def in_halves(x: Tensor, form: AngleForm) -> Tensor:
    """cos or sin in the form of Llama."""
    if form is AngleForm.TWICE:
        return x
    once = x if form is AngleForm.ONCE else x[..., ::2]
    return torch.cat([once, once], -1)


class RotaryTable:
    """cos and sin for the first `positions` positions."""

    def __init__(self, rotary: Rotary, like: Tensor, positions: int):
        places = torch.arange(positions, device=like.device)
        cos, sin = rotary(like[:1, None], places[None])  # transformers uses the dtype and device of the first argument
        self.table = torch.cat([cos[0], sin[0]], -1)  # [positions, 2d]
        self.tables: CosSin = cos_and_sin(self.table)


def cos_and_sin(table: Tensor) -> CosSin:
    """[n, 2d] → cos and sin [n, d]"""
    cos, sin = table.chunk(2, -1)
    return cos, sin


def has_fixed_angles(config: Any) -> bool:
    """Whether the rotary angles of this model depend on the position alone."""
    return rope_kinds(config) <= {*FIXED_ROPE_TYPES}


def fixed_positions(config: Any) -> int | None:
    """Up to how many positions the rotary angles depend on the position alone; None: for all positions.

    LongRoPE changes its angles in texts longer than the original context; windfall allows no such texts.
    """
    if has_fixed_angles(config):
        return None
    positions = longrope_positions(config) if rope_kinds(config) == {"longrope"} else None
    if positions is None:
        raise Unsupported("its rotary angles depend on the length of the text")
    return positions
