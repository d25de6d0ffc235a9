"""Two norms side by side, one program a row; products are rounded one by one, as in `jit.norm`."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, power_of_two
from windfall.kernels.triton.chain import begin


@triton.jit
def _normed(x, weight, width, eps):
    """RMSNorm of a row in its own dtype, fp32."""
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
    CHAINED: tl.constexpr,
):
    """Program (row)."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row
    if INDEXED:
        place = tl.load(index + row)
    token = tl.load(tokens + row)
    state = tl.load(hidden + place * hidden_row + column, mask=inside, other=0.0)
    word = tl.load(embedding + token * embedding_row + column, mask=inside, other=0.0)
    left = _normed(word, tl.load(embedding_weight + column, mask=inside, other=0.0), width, eps)
    right = _normed(state, tl.load(hidden_weight + column, mask=inside, other=0.0), width, eps)
    kind = both.dtype.element_ty
    tl.store(both + row * both_row + column, left.to(kind), mask=inside)
    tl.store(both + row * both_row + width + column, right.to(kind), mask=inside)
    kept = residual + row * residual_row + column
    if NORMED:
        tl.store(kept, right.to(residual.dtype.element_ty), mask=inside)
    else:
        tl.store(kept, state.to(residual.dtype.element_ty), mask=inside)


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
        **follows(hidden),
    )
