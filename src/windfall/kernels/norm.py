"""Fused element-wise operations of a transformer layer. Results are rounded where transformers' Llama rounds them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton
from windfall.kernels.scatter import Scatter


def add_norm(
    x: Tensor,  # [n, width]
    residual: Tensor | None,  # [n, width]; None: the sum is x
    weight: Tensor,  # [width], or [p, width]: row i uses weight i % p
    eps: float,
    pick: Tensor | None = None,  # [m] long: the rows to compute; None: all rows
    scatter: Scatter | None = None,
) -> tuple[Tensor, Tensor]:
    """(weight * normalised(x + residual), x + residual), both [n, width], or [m, width] with `pick`."""
    if on_triton(x):
        from windfall.kernels.triton.norm import add_norm as run
    else:
        run = add_norm_reference
    return run(x, residual, weight, eps, pick, scatter)


def add_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    pick: Tensor | None = None,
    scatter: Scatter | None = None,
) -> tuple[Tensor, Tensor]:
    """`add_norm` with torch."""
    x = x if residual is None else residual + x
    if weight.dim() == 2:
        weight = weight.repeat(-(-len(x) // len(weight)), 1)[: len(x)]
    if pick is not None:
        x, weight = x[pick], weight if weight.dim() == 1 else weight[pick]
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = weight * wide.to(x.dtype)
    if scatter is not None:
        scatter.buffer.index_copy_(0, scatter.rows, normed if scatter.normed else x)
    return normed, x


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(left half) * right half: [n, 2m] → [n, m]."""
    if on_triton(gate_up):
        from windfall.kernels.triton.norm import silu_mul as compiled

        return compiled(gate_up)
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu_mul` with torch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rotate_and_store(
    qkv: Tensor,  # [n, (heads + 2 * kv_heads) * d]: queries, keys, values
    cos: Tensor,  # [n, d]
    sin: Tensor,  # [n, d]
    keys: Tensor,  # [kv_heads, capacity, d], written
    values: Tensor,  # [kv_heads, capacity, d], written
    slots: Tensor,  # [n] integers: each row's slot in the KV cache
    positions: Tensor | None = None,  # [n] long
) -> Tensor:
    """Apply rotary embedding to queries and keys, store keys and values in the KV cache → queries [n, heads, d].

    With `positions`, cos and sin are tables [p, d], indexed by them. Positions past the tables use the last row.
    """
    if on_triton(qkv):
        from windfall.kernels.triton.norm import rotate_and_store as run
    else:
        run = rotate_and_store_reference
    return run(qkv, cos, sin, keys, values, slots, positions)


def rotate_and_store_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    """`rotate_and_store` with torch."""
    if positions is not None:
        cos, sin = (x[positions.clamp(max=len(x) - 1)] for x in (cos, sin))
    shared, width = keys.shape[0], keys.shape[2]
    rows = qkv.reshape(len(qkv), -1, width)  # [n, heads + 2 * kv_heads, d]
    queries_and_keys, value = rows[:, :-shared], rows[:, -shared:]
    left, right = queries_and_keys.chunk(2, -1)
    rotated = queries_and_keys * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]
    keys.index_copy_(1, slots.long(), rotated[:, -shared:].transpose(0, 1))
    values.index_copy_(1, slots.long(), value.transpose(0, 1))
    return rotated[:, :-shared]
