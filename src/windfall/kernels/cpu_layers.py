"""Norms, gates and attention of a few rows on a CPU, in float32, and whole layers, in one call of a C kernel.

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


class Linear(ctypes.Structure):
    """A linear layer; the weight is in the format of this number (kernels/cpu/panels.h)."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_long),
        ("inputs", ctypes.c_long),
        ("format", ctypes.c_long),
    )


class Layer(ctypes.Structure):
    """A decoder layer of the Llama family. All tensors must stay where they are while this is used."""

    _fields_ = (
        *((name, Linear) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("before_attention", "before_mlp", "query_norm", "key_norm")),
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "width")),
        *(
            (name, ctypes.c_float)
            for name in ("before_attention_eps", "before_mlp_eps", "query_eps", "key_eps", "scale")
        ),
    )


class LayerKernels:
    """The compiled kernels. The tensors of `norm` and `gate_up` are `readable`."""

    def __init__(self, compiled: ctypes.CDLL):
        pointer, long, number, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
        self._norm, self._gate_up, self._attention = compiled.norm, compiled.gate_up, compiled.attention
        self._norm.argtypes = [pointer] * 3 + [long] * 2 + [number]
        self._gate_up.argtypes = [pointer] * 3 + [long]
        self._attention.argtypes = [pointer] * 10 + [number, integer]
        self._norm.restype = self._gate_up.restype = self._attention.restype = None
        self._layers, self._layers.argtypes = compiled.decoder_layers, [pointer, long, *[pointer] * 7, integer]
        self._concat, self._concat.argtypes = compiled.concat_layer, [*[pointer] * 2, integer, *[pointer] * 9, integer]

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
        shared = kv_heads * width
        shapes = queries.shape[2] % shared == 0 and keys.shape == values.shape == (batch, rows, shared)
        if not (shapes and readable(queries, keys, values) and _attends(rows, cos, sin, cache, start, mask)):
            return None
        given = [each.contiguous() for each in (queries, keys, values, cos, sin)]
        found, mask = torch.empty_like(given[0]), None if mask is None else mask.contiguous()
        sizes = (ctypes.c_long * 7)(batch, rows, queries.shape[2] // width, kv_heads, width, capacity, start)
        places = [each.data_ptr() for each in (*given, *cache)]
        places += [0 if mask is None else mask.data_ptr(), found.data_ptr(), ctypes.addressof(sizes)]
        self._attention(*places, scale, torch.get_num_threads())
        return found

    def decoder_layers(
        self,
        layers: list[Layer],
        x: Tensor,  # [B, n, H]
        cos: Tensor,
        sin: Tensor,
        caches: list[tuple[Tensor, Tensor]],
        start: int,
        mask: Tensor | None,
    ) -> Tensor | None:
        """What each layer returns [layers, B, n, H]. All have the same sizes.

        The other tensors, and None, are as in `attention`.
        """
        first, (batch, kv_heads, capacity, width), (_, rows, hidden) = layers[0], caches[0][0].shape, x.shape
        shapes = (kv_heads, width, hidden) == (first.kv_heads, first.width, first.q.inputs) and len(x) == batch
        same = all(keys.shape == caches[0][0].shape for keys, _ in caches)
        if not (shapes and same and readable(x) and all(_attends(rows, cos, sin, own, start, mask) for own in caches)):
            return None
        count, (x, cos, sin) = len(layers), (each.contiguous() for each in (x, cos, sin))
        found, mask = x.new_empty(count, *x.shape), None if mask is None else mask.contiguous()
        sizes = (ctypes.c_long * 4)(batch, rows, capacity, start)
        stored = (ctypes.c_void_p * (2 * count))(*(each.data_ptr() for own in caches for each in own))
        given = (ctypes.c_void_p * count)(*map(ctypes.addressof, layers))
        places = [each.data_ptr() for each in (x, found, cos, sin)]
        places += [ctypes.addressof(stored), 0 if mask is None else mask.data_ptr(), ctypes.addressof(sizes)]
        done = self._layers(ctypes.addressof(given), count, *places, torch.get_num_threads())
        return found if done else None

    def concat_layer(
        self,
        layer: Layer,  # of 2H inputs
        feature_norm: Tensor,
        add_normed: bool,  # what the layer adds to: the normed features, not the features
        embedded: Tensor,  # [B, n, H]
        features: Tensor,  # [B, n, H]
        cos: Tensor,
        sin: Tensor,
        cache: tuple[Tensor, Tensor],
        start: int,
        mask: Tensor | None,
    ) -> Tensor | None:
        """What the first layer of an EAGLE-3 head returns [B, n, H]; the rest is as in `attention`."""
        (batch, kv_heads, capacity, width), (_, rows, hidden) = cache[0].shape, features.shape
        sizes_fit = (kv_heads, width, 2 * hidden) == (layer.kv_heads, layer.width, layer.q.inputs)
        shapes = sizes_fit and len(features) == batch and embedded.shape == features.shape
        if not (shapes and readable(embedded, features) and _attends(rows, cos, sin, cache, start, mask)):
            return None
        embedded, features, cos, sin = (each.contiguous() for each in (embedded, features, cos, sin))
        found, mask = torch.empty_like(features), None if mask is None else mask.contiguous()
        sizes = (ctypes.c_long * 4)(batch, rows, capacity, start)
        places = [each.data_ptr() for each in (embedded, features, found, cos, sin, *cache)]
        places += [0 if mask is None else mask.data_ptr(), ctypes.addressof(sizes)]
        given = ctypes.addressof(layer), feature_norm.data_ptr(), int(add_normed)
        return found if self._concat(*given, *places, torch.get_num_threads()) else None


def _attends(
    rows: int, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor], start: int, mask: Tensor | None
) -> bool:
    """Whether the kernels can attend with these angles, cache and mask."""
    batch, _, capacity, width = cache[0].shape
    masked = mask is None or (mask.shape == (batch, 1, rows, start + rows) and mask.dtype is torch.bool and mask.is_cpu)
    stored = cache[0].is_contiguous() and cache[1].is_contiguous() and start + rows <= capacity
    turned = cos.shape == sin.shape == (batch, rows, width)
    return masked and stored and turned and readable(cos, sin, *cache)


@cache
def layer_kernels(folder: Path) -> LayerKernels | None:
    """The kernels, compiled into this folder. None: they cannot be compiled here."""
    found = library(SOURCE, folder)
    return None if found is None else LayerKernels(found[0])


_prepared: list[LayerKernels] = []


@cache
def prepare_layer_kernels(folder: Path) -> None:
    """Compile and load the kernels, if that works here. They are kept in this folder."""
    found = None if _prepared else layer_kernels(folder)
    if found is not None:
        _prepared.append(found)


def prepared_kernels() -> LayerKernels | None:
    return _prepared[0] if _prepared else None
