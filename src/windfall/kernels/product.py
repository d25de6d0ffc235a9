"""A layer's matrix products, fused with the operations around them: residual sum, norm, rotary embedding or gate.

With small weights, a pass spends most of its time on launches and latency. One fused kernel then computes all of it,
and loads its weight while the previous kernel still runs. With large weights, one kernel computes the product and
others do the rest.

With `exact`, the result of a row is bit-identical in every pass. It does not depend on the number of rows or on the
other rows, because the order of each sum depends only on the shape of the weight. Without `exact`, torch computes
products with large weights or many rows.

Layers that are quantised or have adapters compute their products themselves (module_product.py); what belongs around
them takes separate kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton, shared_memory, supports_pdl
from windfall.kernels.eight_bits import EightBitWeight
from windfall.kernels.module_product import ModuleProduct
from windfall.kernels.norm import add_norm, gate_mul, rotate_and_store
from windfall.kernels.norm_kinds import LLAMA_NORM, LLAMA_ROTATION, HeadNorms, NormStyle, Rotation

if TYPE_CHECKING:
    from windfall.kernels.triton.product import Tiling

Weight = Tensor | ModuleProduct | EightBitWeight  # [N, K], or what computes the product with it, and its bias
HALF_DTYPES = (torch.bfloat16, torch.float16)
MAX_FUSED_ROWS = 64  # with more rows, exact passes compute a product with larger tiles, and the rest apart
MAX_LINEAR_ROWS = 16  # the same for products that are fused with nothing
MAX_FAST_ROWS = 64  # with at most this number, fast passes also use our product, which can start early
MAX_NORMED = 1024  # elements of a row up to which its norm is fused with a product
PIECE_ROWS = 64  # rows that torch multiplies at a time in exact mode


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, exact: bool = False, out: Tensor | None = None
) -> Tensor:
    """`F.linear` of rows [n, K]. The fused kernel is used where it can start before its predecessor has ended.

    The result is written to `out`, contiguous, if it is given.
    """
    tiling = tiling_for(x, weight, exact) if supports_pdl(x.device) else None
    if tiling is None or not isinstance(weight, Tensor) or wide(x, weight, MAX_LINEAR_ROWS):
        return product(x, weight, bias, exact, out)
    from windfall.kernels.triton.product import linear as run

    return run(x, weight, bias, tiling, out)


def product(x: Tensor, weight: Weight, bias: Tensor | None, exact: bool, out: Tensor | None = None) -> Tensor:
    """`F.linear`, with `exact` in an order that does not depend on the rows."""
    if not isinstance(weight, Tensor):
        made = weight(x, exact)  # with its biases
        return made if out is None else out.copy_(made)
    if multiplies(x, weight, exact):
        from windfall.kernels.triton.matmul import matmul, supported

        if supported(x, weight):
            return matmul(x, weight, bias, out)
    if out is not None and bias is None and not exact:
        return torch.mm(x, weight.T, out=out)
    made = by_pieces(x, weight, bias) if exact and x.is_cuda else F.linear(x, weight, bias)
    return made if out is None else out.copy_(made)


def multiplies(x: Tensor, weight: Tensor, exact: bool) -> bool:
    """Whether a product that is fused with nothing uses our kernel."""
    return is_half(x, weight) and (exact or (supports_pdl(x.device) and len(x) <= MAX_FAST_ROWS))


def by_pieces(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of PIECE_ROWS rows at a time, padded. For one number of rows, torch sums every row in one order."""
    pieces = torch.split(F.pad(x, (0, 0, 0, -len(x) % PIECE_ROWS)), PIECE_ROWS)
    return torch.cat([F.linear(piece, weight, bias) for piece in pieces])[: len(x)]


def norm_gate(
    x: Tensor,  # [n, K]
    residual: Tensor | None,  # [n, K]; None: the sum is x
    norm: Tensor | None,  # [K]; None: the sum is not normalised
    eps: float,
    weight: Weight,  # [2m, K]: gate projection, then up projection
    exact: bool = False,
    style: NormStyle = LLAMA_NORM,
    gelu: bool = False,
) -> tuple[Tensor, Tensor]:
    """With normed = norm(x + residual): (silu(gate(normed)) * up(normed) [n, m], x + residual).

    Gates of GELU and other norms than Llama's take a kernel each.
    """
    plain = norm is not None and style.plain and not gelu
    tiling = tiling_for(x, weight, exact, normed=True) if plain else None
    if norm is None or tiling is None or not isinstance(weight, Tensor) or wide(x, weight):
        normed, total = normed_rows(x, residual, norm, eps, tiling, style)
        return gate_product(normed, weight, exact, gelu), total
    from windfall.kernels.triton.product import norm_gate as run

    return run(x, residual, norm, eps, weight, tiling)


def gate_product(x: Tensor, weight: Weight, exact: bool, gelu: bool = False) -> Tensor:
    """`gate_mul` of `product`, in one kernel where that can start before its predecessor has ended."""
    if isinstance(weight, Tensor) and multiplies(x, weight, exact) and supports_pdl(x.device):
        from windfall.kernels.triton.gate_product import gate_product as run
        from windfall.kernels.triton.gate_product import supported

        if supported(x, weight):
            return run(x, weight, gelu)
    return gate_mul(product(x, weight, None, exact), gelu)


def norm_rotate(
    x: Tensor,  # [n, K]
    residual: Tensor | None,  # [n, K]
    norm: Tensor | None,  # [K]; None: the sum is not normalised
    eps: float,
    weight: Weight,  # [(heads + 2 * kv_heads) * d, K]: projections of queries, keys, values
    bias: Tensor | None,
    cos: Tensor,  # [n, r]
    sin: Tensor,  # [n, r]
    keys: Tensor,  # [kv_heads, capacity, d], written
    values: Tensor,  # [kv_heads, capacity, d], written
    slots: Tensor,  # [n] integers
    exact: bool = False,
    style: NormStyle = LLAMA_NORM,
    norms: HeadNorms | None = None,
    rotation: Rotation = LLAMA_ROTATION,
) -> tuple[Tensor, Tensor]:
    """(`rotate_and_store` of the product of norm(x + residual) [n, heads, d], x + residual).

    Norms of heads, and other norms and rotations than Llama's, take separate kernels.
    """
    whole = rotation == LLAMA_ROTATION and cos.shape[1] == keys.shape[2]
    plain = norm is not None and style.plain and norms is None and whole
    tiling = tiling_for(x, weight, exact, unit=keys.shape[2], normed=True) if plain else None
    if tiling is not None and keys.shape[2] % tiling.outputs:  # the outputs of a program must belong to one head
        tiling = None
    if norm is None or tiling is None or not isinstance(weight, Tensor) or wide(x, weight):
        normed, total = normed_rows(x, residual, norm, eps, tiling, style)
        qkv = product(normed, weight, bias, exact)
        return rotate_and_store(qkv, cos, sin, keys, values, slots, norms=norms, rotation=rotation), total
    from windfall.kernels.triton.product import norm_rotate as run

    return run(x, residual, norm, eps, weight, bias, cos, sin, keys, values, slots, tiling)


def normed_rows(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float,
    tiling: Tiling | None,
    style: NormStyle,
) -> tuple[Tensor, Tensor]:
    """`add_norm`, with the roundings of the fused kernels if passes of fewer rows use these."""
    if norm is None or tiling is None:
        return add_norm(x, residual, norm, eps, style=style)
    from windfall.kernels.triton.product import add_norm as run

    return run(x, residual, norm, eps, tiling)


def wide(x: Tensor, weight: Tensor, most: int = MAX_FUSED_ROWS) -> bool:
    """Whether there are more than `most` rows, and the product with larger tiles rounds like a fused kernel."""
    if len(x) <= most or not supports_pdl(x.device):
        return False
    from windfall.kernels.triton.matmul import segments_of, supported

    return supported(x, weight) and segments_of(*weight.shape)[0] == 1


def tiling_for(
    x: Tensor, weight: Weight, exact: bool = False, unit: int | None = None, normed: bool = False
) -> Tiling | None:
    """The tiling of a fused kernel for these operands; None: use `product`."""
    if (
        not isinstance(weight, Tensor)
        or not is_half(x, weight)
        or not weight.is_contiguous()
        or (normed and x.shape[1] > MAX_NORMED)
    ):
        return None
    from windfall.kernels.triton.product import choose_tiling, exact_tiling

    size, memory = (len(x), len(weight), x.shape[1]), shared_memory(x.device)
    return exact_tiling(*size, memory, unit or len(weight), normed) if exact else choose_tiling(*size, memory)


def is_half(x: Tensor, weight: Tensor) -> bool:
    """Whether Triton kernels multiply these, in half precision."""
    return on_triton(x) and x.dtype in HALF_DTYPES and x.dtype == weight.dtype
