"""Where a kernel runs: Triton for tensors on CUDA (or anywhere under Triton's interpreter), torch for all others."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def installed() -> bool:
    return find_spec("triton") is not None


def on_triton(x: Tensor) -> bool:
    """Whether the Triton kernels take this tensor; their sums are fp32, which is too little for fp64."""
    there = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return there and x.dtype != torch.float64 and installed()


def power_of_two(least: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(least - 1, 0).bit_length()
