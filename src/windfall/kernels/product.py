"""A layer's products with what comes before and after: add to the stream, norm, multiply, turn or gate the outputs.

Where the weights are small, launches and latency are what a pass is made of. All of that is one kernel then, and loads
its weight while the kernel before it still runs. Else it is one kernel for each, around torch's product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import chains, on_triton, shared_memory
from windfall.kernels.norm import add_norm, rotate_and_store, silu_mul

if TYPE_CHECKING:
    from windfall.kernels.triton.product import Form

HALVES = (torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of rows [n, K]; unchained, torch's own is as fast."""
    form = form_of(x, weight) if chains(x.device) else None
    if form is None:
        return F.linear(x, weight, bias)
    from windfall.kernels.triton.product import linear as run

    return run(x, weight, bias, form)


def norm_gate(
    x: Tensor,  # [n, K]
    residual: Tensor | None,  # [n, K]; without it the stream is x itself
    norm: Tensor,  # [K]
    eps: float,
    weight: Tensor,  # [2m, K]: gates, then what they gate
) -> tuple[Tensor, Tensor]:
    """(silu(gates) * the others [n, m], x + residual)"""
    form = form_of(x, weight)
    if form is None:
        normed, total = add_norm(x, residual, norm, eps)
        return silu_mul(F.linear(normed, weight)), total
    from windfall.kernels.triton.product import norm_gate as run

    return run(x, residual, norm, eps, weight, form)


def norm_rotate(
    x: Tensor,  # [n, K]
    residual: Tensor | None,  # [n, K]
    norm: Tensor,  # [K]
    eps: float,
    weight: Tensor,  # [(heads + 2 * kv_heads) * d, K]: of queries, keys, values
    bias: Tensor | None,
    cos: Tensor,  # [n, d]
    sin: Tensor,  # [n, d]
    keys: Tensor,  # [kv_heads, capacity, d], written
    values: Tensor,  # [kv_heads, capacity, d], written
    slots: Tensor,  # [n] integers
) -> tuple[Tensor, Tensor]:
    """(what `rotate_and_store` makes of the product [n, heads, d], x + residual)"""
    form = form_of(x, weight)
    if form is None or keys.shape[2] % form.outputs:  # a program's outputs are of one head
        normed, total = add_norm(x, residual, norm, eps)
        return rotate_and_store(F.linear(normed, weight, bias), cos, sin, keys, values, slots), total
    from windfall.kernels.triton.product import norm_rotate as run

    return run(x, residual, norm, eps, weight, bias, cos, sin, keys, values, slots, form)


def form_of(x: Tensor, weight: Tensor) -> Form | None:
    """How one kernel multiplies these; None: torch does."""
    if not on_triton(x) or x.dtype not in HALVES or x.dtype != weight.dtype or not weight.is_contiguous():
        return None
    from windfall.kernels.triton.product import form

    return form(len(x), len(weight), x.shape[1], shared_memory(x.device))
