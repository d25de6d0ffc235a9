"""Which backend runs a kernel: Triton for tensors on CUDA (or on any device under Triton's interpreter), else torch.

It also holds the launch options for programmatic dependent launch (PDL), by which a kernel may start before its
predecessor on the stream has finished.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@cache
def triton_installed() -> bool:
    return find_spec("triton") is not None


@cache
def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, which it decides once, when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on_triton(x: Tensor) -> bool:
    """Whether Triton kernels run on this tensor. They accumulate in fp32, so fp64 tensors are left to torch."""
    available = x.is_cuda or interpreted()
    return available and x.dtype != torch.float64 and triton_installed()


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch (compute capability 9.0 or newer)."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_trigger(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that lets its successor start early, but is itself launched in the ordinary way."""
    return {"PDL": supports_pdl(x.device)}


def pdl_launch(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that may start before its predecessor has finished, and lets its successor do so.

    The kernel must call `pdl_wait` (triton/pdl.py) before it reads what its predecessor wrote. The same holds for its
    predecessor, if that is one of these kernels.
    """
    return {"PDL": True, "launch_pdl": True} if supports_pdl(x.device) else {"PDL": False}


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can use on this device."""
    if device.type != "cuda":
        return 1 << 20  # under the interpreter
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << max(least - 1, 0).bit_length()
