"""What lies between a layer's matrix products, fused, each rounding where transformers' Llama rounds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(weight * normalised(x + residual), x + residual), all [n, width]; without a residual the sum is x itself."""
    if on_triton(x):
        from windfall.kernels.jit.norm import add_norm as compiled

        return compiled(x, residual, weight, eps)
    return add_norm_reference(x, residual, weight, eps)


def add_norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x if residual is None else residual + x
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype), x


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(left half) * right half: [n, 2m] → [n, m]."""
    if on_triton(gate_up):
        from windfall.kernels.jit.norm import silu_mul as compiled

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
) -> Tensor:
    """Turn queries and keys by their positions, put keys and values in the cache → queries [n, heads, d]."""
    if on_triton(qkv):
        from windfall.kernels.jit.norm import rotate_and_store as compiled

        return compiled(qkv, cos, sin, keys, values, slots)
    return rotate_and_store_reference(qkv, cos, sin, keys, values, slots)


def rotate_and_store_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    shared, width = keys.shape[0], keys.shape[2]
    rows = qkv.reshape(len(qkv), -1, width)  # [n, heads + 2 * kv_heads, d]
    plain, value = rows[:, :-shared], rows[:, -shared:]
    left, right = plain.chunk(2, -1)
    turned = plain * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]
    keys.index_copy_(1, slots.long(), turned[:, -shared:].transpose(0, 1))
    values.index_copy_(1, slots.long(), value.transpose(0, 1))
    return turned[:, :-shared]
