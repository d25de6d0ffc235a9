"""The weights of a mixture of experts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Experts(NamedTuple):
    """The weights of a layer's E experts, and how a row uses them. The defaults are those of GPT-OSS."""

    gate_up: Tensor  # [E, H, 2I], where gate and up projections alternate; `linear`: [E, 2I, H], gate projections first
    gate_up_bias: Tensor | None  # [E, 2I]
    down: Tensor  # [E, I, H]; `linear`: [E, H, I]
    down_bias: Tensor | None  # [E, H]
    top_k: int  # experts of a row
    alpha: float = 1.702
    limit: float | None = 7.0  # of gate and up projections; None: the gate is SiLU, without alpha
    linear: bool = False  # the weights are laid out as those of linear layers
    normalised: bool = True  # the shares of a row's experts sum to 1; otherwise those of all experts do
    wide: bool = False  # shares, and outputs multiplied by them, are fp32
