"""The weights of a mixture of experts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Experts(NamedTuple):
    """The weights of a layer's E experts, how many of them a row uses, and the constants of their gate."""

    gate_up: Tensor  # [E, H, 2I]; gate and up projection alternate in the last dimension
    gate_up_bias: Tensor  # [E, 2I]
    down: Tensor  # [E, I, H]
    down_bias: Tensor  # [E, H]
    top_k: int
    alpha: float = 1.702
    limit: float = 7.0
