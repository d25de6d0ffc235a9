"""Norms, gates and attention of a few rows on a CPU, in float32, each in one call of a C kernel.

With a small model, a pass of a few rows spends more time on starting torch's operations than on computing them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from windfall.kernels.cpu.compile import library

SOURCE = Path(__file__).parent / "cpu" / "layers.c"
WIDTH_STEP = 16  # widths of rows and heads are multiples of this


class LayerKernels:
    """The compiled kernels. All tensors are contiguous, in float32, on a CPU."""

    def __init__(self, compiled: ctypes.CDLL):
        pointer, long, number, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
        self._norm, self._gate_up, self._attention = compiled.norm, compiled.gate_up, compiled.attention
        self._norm.argtypes = [pointer] * 3 + [long] * 2 + [number]
        self._gate_up.argtypes = [pointer] * 2 + [long]
        self._attention.argtypes = [pointer] * 10 + [number, integer]
        self._norm.restype = self._gate_up.restype = self._attention.restype = None

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The RMS norm of rows [.., K], times the weight."""
        found, width = torch.empty_like(x), x.shape[-1]
        self._norm(x.data_ptr(), weight.data_ptr(), found.data_ptr(), x.numel() // width, width, eps)
        return found

    def gate_up(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, written to `gate`."""
        self._gate_up(gate.data_ptr(), up.data_ptr(), gate.numel())
        return gate

    def attention(
        self,
        queries: Tensor,  # [B, n, heads * d], rotated in place
        keys: Tensor,  # [B, n, kv_heads * d]
        values: Tensor,  # [B, n, kv_heads * d]
        cos: Tensor,  # [B, n, d]
        sin: Tensor,  # [B, n, d]
        cache: tuple[Tensor, Tensor],  # keys and values [B, kv_heads, capacity, d], written after `start`
        start: int,
        mask: Tensor | None,  # [B, 1, n, start + n] bool; None: causal
        scale: float,
    ) -> Tensor:
        """Rotate queries and keys, store keys and values, and attend: [B, n, heads * d]."""
        batch, kv_heads, capacity, width = cache[0].shape
        found, rows, heads = torch.empty_like(queries), queries.shape[1], queries.shape[2] // width
        sizes = (ctypes.c_long * 7)(batch, rows, heads, kv_heads, width, capacity, start)
        tensors = (queries, keys, values, cos, sin, *cache)
        places = (*(each.data_ptr() for each in tensors), 0 if mask is None else mask.data_ptr(), found.data_ptr())
        self._attention(*places, ctypes.addressof(sizes), scale, torch.get_num_threads())
        return found


@cache
def layer_kernels(folder: Path) -> LayerKernels | None:
    """The kernels, compiled into this folder. None: they cannot be compiled here."""
    found = library(SOURCE, folder)
    return None if found is None else LayerKernels(found[0])
