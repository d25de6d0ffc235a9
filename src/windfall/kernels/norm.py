"""What lies between a layer's matrix products, fused, each rounding where transformers' Llama rounds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton
from windfall.kernels.keep import Keep


def add_norm(
    x: Tensor,  # [n, width]
    residual: Tensor | None,  # [n, width]; without it the sum is x itself
    weight: Tensor,  # [width], or [p, width]: row i has that of i % p
    eps: float,
    pick: Tensor | None = None,  # [m] long: the rows that are wanted; all of them, if not given
    keep: Keep | None = None,
) -> tuple[Tensor, Tensor]:
    """(weight * normalised(x + residual), x + residual), both [n, width], or [m, width] of the rows picked."""
    if on_triton(x):
        from windfall.kernels.triton.norm import add_norm as run
    else:
        run = add_norm_reference
    return run(x, residual, weight, eps, pick, keep)


def add_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    pick: Tensor | None = None,
    keep: Keep | None = None,
) -> tuple[Tensor, Tensor]:
    x = x if residual is None else residual + x
    if weight.dim() == 2:
        weight = weight.repeat(-(-len(x) // len(weight)), 1)[: len(x)]
    if pick is not None:
        x, weight = x[pick], weight if weight.dim() == 1 else weight[pick]
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = weight * wide.to(x.dtype)
    if keep is not None:
        keep.rows.index_copy_(0, keep.at, normed if keep.normed else x)
    return normed, x


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(left half) * right half: [n, 2m] → [n, m]."""
    if on_triton(gate_up):
        from windfall.kernels.triton.norm import silu_mul as compiled

        return compiled(gate_up)
    return silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rotate_and_store(
    qkv: Tensor,  # [n, (heads + 2 * kv_heads) * d]: queries, keys, values
    cos: Tensor,  # [n, d]
    sin: Tensor,  # [n, d]
    keys: Tensor,  # [kv_heads, capacity, d], written
    values: Tensor,  # [kv_heads, capacity, d], written
    slots: Tensor,  # [n] integers: each row's place in the cache
    positions: Tensor
    | None = None,  # [n] long: which rows of cos and sin, of any number then; those past them: the last
) -> Tensor:
    """Turn queries and keys by their positions, put keys and values in the cache → queries [n, heads, d]."""
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
    if positions is not None:
        cos, sin = (x[positions.clamp(max=len(x) - 1)] for x in (cos, sin))
    shared, width = keys.shape[0], keys.shape[2]
    rows = qkv.reshape(len(qkv), -1, width)  # [n, heads + 2 * kv_heads, d]
    plain, value = rows[:, :-shared], rows[:, -shared:]
    left, right = plain.chunk(2, -1)
    turned = plain * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]
    keys.index_copy_(1, slots.long(), turned[:, -shared:].transpose(0, 1))
    values.index_copy_(1, slots.long(), value.transpose(0, 1))
    return turned[:, :-shared]
