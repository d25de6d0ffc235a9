"""Where a kernel runs: Triton for tensors on CUDA (or anywhere under Triton's interpreter), torch for all others."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@cache
def installed() -> bool:
    return find_spec("triton") is not None


def on_triton(x: Tensor) -> bool:
    """Whether the Triton kernels take this tensor; their sums are fp32, which is too little for fp64."""
    there = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return there and x.dtype != torch.float64 and installed()


@cache
def chains(device: torch.device) -> bool:
    """Whether kernels there may begin before the one ahead of them has ended."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def leads(x: Tensor) -> dict[str, Any]:
    """Options of a kernel behind which another of ours comes: that one may be there before this one has ended."""
    return {"CHAINED": chains(x.device)}


def follows(x: Tensor) -> dict[str, Any]:
    """Options of a kernel that comes behind another of ours, mostly: both `begin` with waiting (jit/chain.py)."""
    return {"CHAINED": True, "launch_pdl": True} if chains(x.device) else {"CHAINED": False}


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that the threads of a program can share on this device."""
    if device.type != "cuda":
        return 1 << 20  # under the interpreter
    from triton.runtime import driver

    place = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(place)["max_shared_mem"])


def power_of_two(least: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(least - 1, 0).bit_length()
