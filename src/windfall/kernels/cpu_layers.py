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
from windfall.kernels.cpu.operands import readable

SOURCE = Path(__file__).parent / "cpu" / "layers.c"
WIDTH_STEP = 16  # widths of rows and heads are multiples of this


class LayerKernels:
    """The compiled kernels. The tensors of `norm` and `gate_up` are `readable`."""

    def __init__(self, compiled: ctypes.CDLL):
        pointer, long, number, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
        self._norm, self._gate_up, self._attention = compiled.norm, compiled.gate_up, compiled.attention
        self._norm.argtypes = [pointer] * 3 + [long] * 2 + [number]
        self._gate_up.argtypes = [pointer] * 3 + [long]
        self._attention.argtypes = [pointer] * 10 + [number, integer]
        self._norm.restype = self._gate_up.restype = self._attention.restype = None

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The RMS norm of rows [.., K], times the weight."""
        x, width = x.contiguous(), x.shape[-1]
        found = torch.empty_like(x)
        self._norm(x.data_ptr(), weight.data_ptr(), found.data_ptr(), x.numel() // width, width, eps)
        return found

    def gate_up(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up"""
        gate, up = gate.contiguous(), up.contiguous()
        found = torch.empty_like(gate)
        self._gate_up(gate.data_ptr(), up.data_ptr(), found.data_ptr(), gate.numel())
        return found

    def attention(
        self,
        queries: Tensor,  # [B, n, heads * d]
        keys: Tensor,  # [B, n, kv_heads * d]
        values: Tensor,  # [B, n, kv_heads * d]
        cos: Tensor,  # [B, n, d]
        sin: Tensor,  # [B, n, d]
        cache: tuple[Tensor, Tensor],  # keys and values, both [B, kv_heads, capacity, d], written after `start`
        start: int,
        mask: Tensor | None,  # [B, 1, n, start + n] bool; None: causal
        scale: float,
    ) -> Tensor | None:
        """Rotate queries and keys, store keys and values, and attend: [B, n, heads * d].

        None, and nothing is stored: the tensors are not as described here, or not `readable`.
        """
        (batch, kv_heads, capacity, width), rows = cache[0].shape, queries.shape[1]
        shared, seen = kv_heads * width, (batch, 1, rows, start + rows)
        shapes = (
            queries.shape[2] % shared == 0
            and keys.shape == values.shape == (batch, rows, shared)
            and cos.shape == sin.shape == (batch, rows, width)
            and start + rows <= capacity
        )
        masked = mask is None or (mask.shape == seen and mask.dtype is torch.bool and mask.is_cpu)
        stored = cache[0].is_contiguous() and cache[1].is_contiguous()
        if not (shapes and masked and stored and readable(queries, keys, values, cos, sin, *cache)):
            return None
        given = [each.contiguous() for each in (queries, keys, values, cos, sin)]
        found, mask = torch.empty_like(given[0]), None if mask is None else mask.contiguous()
        sizes = (ctypes.c_long * 7)(batch, rows, queries.shape[2] // width, kv_heads, width, capacity, start)
        places = [each.data_ptr() for each in (*given, *cache)]
        places += [0 if mask is None else mask.data_ptr(), found.data_ptr(), ctypes.addressof(sizes)]
        self._attention(*places, scale, torch.get_num_threads())
        return found


@cache
def layer_kernels(folder: Path) -> LayerKernels | None:
    """The kernels, compiled into this folder. None: they cannot be compiled here."""
    found = library(SOURCE, folder)
    return None if found is None else LayerKernels(found[0])
