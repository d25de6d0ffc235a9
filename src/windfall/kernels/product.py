"""A layer's matrix products, fused with the operations around them: residual sum, norm, rotary embedding or SiLU gate.

With small weights, a pass spends most of its time on launches and latency. One fused kernel then computes all of it,
and loads its weight while the previous kernel still runs. With large weights, torch computes the product and separate
kernels do the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton, shared_memory, supports_pdl
from windfall.kernels.norm import add_norm, rotate_and_store, silu_mul

if TYPE_CHECKING:
    from windfall.kernels.triton.product import Tiling

HALF_DTYPES = (torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of rows [n, K]. Without dependent launch, torch's own kernel is as fast and is used."""
    tiling = tiling_for(x, weight) if supports_pdl(x.device) else None
    if tiling is None:
        return F.linear(x, weight, bias)
    from windfall.kernels.triton.product import linear as run

    return run(x, weight, bias, tiling)


def norm_gate(
    x: Tensor,  # [n, K]
    residual: Tensor | None,  # [n, K]; None: the sum is x
    norm: Tensor,  # [K]
    eps: float,
    weight: Tensor,  # [2m, K]: gate projection, then up projection
) -> tuple[Tensor, Tensor]:
    """With normed = norm(x + residual): (silu(gate(normed)) * up(normed) [n, m], x + residual)."""
    tiling = tiling_for(x, weight)
    if tiling is None:
        normed, total = add_norm(x, residual, norm, eps)
        return silu_mul(F.linear(normed, weight)), total
    from windfall.kernels.triton.product import norm_gate as run

    return run(x, residual, norm, eps, weight, tiling)


def norm_rotate(
    x: Tensor,  # [n, K]
    residual: Tensor | None,  # [n, K]
    norm: Tensor,  # [K]
    eps: float,
    weight: Tensor,  # [(heads + 2 * kv_heads) * d, K]: projections of queries, keys, values
    bias: Tensor | None,
    cos: Tensor,  # [n, d]
    sin: Tensor,  # [n, d]
    keys: Tensor,  # [kv_heads, capacity, d], written
    values: Tensor,  # [kv_heads, capacity, d], written
    slots: Tensor,  # [n] integers
) -> tuple[Tensor, Tensor]:
    """(`rotate_and_store` of the product of norm(x + residual) [n, heads, d], x + residual)."""
    tiling = tiling_for(x, weight)
    if tiling is None or keys.shape[2] % tiling.outputs:  # the outputs of a program must belong to one head
        normed, total = add_norm(x, residual, norm, eps)
        return rotate_and_store(F.linear(normed, weight, bias), cos, sin, keys, values, slots), total
    from windfall.kernels.triton.product import norm_rotate as run

    return run(x, residual, norm, eps, weight, bias, cos, sin, keys, values, slots, tiling)


def tiling_for(x: Tensor, weight: Tensor) -> Tiling | None:
    """The tiling of a fused kernel for these operands; None: use torch's product."""
    if not on_triton(x) or x.dtype not in HALF_DTYPES or x.dtype != weight.dtype or not weight.is_contiguous():
        return None
    from windfall.kernels.triton.product import choose_tiling

    return choose_tiling(len(x), len(weight), x.shape[1], shared_memory(x.device))
