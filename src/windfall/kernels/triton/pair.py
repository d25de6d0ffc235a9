"""Two norms per row, one program per row. Products are rounded one by one, as in `triton.norm`."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.triton.pdl import pdl_wait


@triton.jit
def _normed(x, weight, width, eps):
    """RMSNorm of a row → fp32; intermediate results are rounded to the row's dtype."""
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    return weight.to(tl.float32) * wide.to(x.dtype).to(tl.float32)


@triton.jit
def _pair_norm(
    tokens,
    embedding,
    embedding_weight,
    hidden,
    index,
    hidden_weight,
    both,
    residual,
    width,
    eps,
    embedding_row,
    hidden_row,
    both_row,
    residual_row,
    INDEXED: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row)."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    hidden_at = row
    if INDEXED:
        hidden_at = tl.load(index + row)
    token = tl.load(tokens + row)
    state = tl.load(hidden + hidden_at * hidden_row + column, mask=inside, other=0.0)
    vector = tl.load(embedding + token * embedding_row + column, mask=inside, other=0.0)
    left = _normed(vector, tl.load(embedding_weight + column, mask=inside, other=0.0), width, eps)
    right = _normed(state, tl.load(hidden_weight + column, mask=inside, other=0.0), width, eps)
    kind = both.dtype.element_ty
    tl.store(both + row * both_row + column, left.to(kind), mask=inside)
    tl.store(both + row * both_row + width + column, right.to(kind), mask=inside)
    goal = residual + row * residual_row + column
    if NORMED:
        tl.store(goal, right.to(residual.dtype.element_ty), mask=inside)
    else:
        tl.store(goal, state.to(residual.dtype.element_ty), mask=inside)


def pair_norm(
    tokens: Tensor,
    embedding: Tensor,
    embedding_weight: Tensor,
    hidden: Tensor,
    index: Tensor | None,
    hidden_weight: Tensor,
    eps: float,
    both: Tensor,
    residual: Tensor,
    normed_residual: bool,
) -> None:
    rows, width = len(tokens), hidden.shape[1]
    assert embedding.stride(1) == hidden.stride(1) == both.stride(1) == residual.stride(1) == 1
    block = power_of_two(width)
    _pair_norm[(rows,)](
        tokens,
        embedding,
        embedding_weight,
        hidden,
        tokens if index is None else index,
        hidden_weight,
        both,
        residual,
        width,
        eps,
        embedding.stride(0),
        hidden.stride(0),
        both.stride(0),
        residual.stride(0),
        INDEXED=index is not None,
        NORMED=normed_residual,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        enable_fp_fusion=False,
        **pdl_launch(hidden),
    )
