"""Element-wise kernels. Products and sums are rounded one by one, as separate torch operations would: no fused
multiply-add, and a pass through the model's dtype wherever eager code stores a result."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, power_of_two
from windfall.kernels.keep import Keep
from windfall.kernels.triton.chain import begin

ACROSS = 512  # columns of a program of silu_mul


@triton.jit
def _add_norm(
    x,
    residual,
    weight,
    normed,
    total,
    pick,
    kept,
    kept_at,
    width,
    eps,
    x_row,
    residual_row,
    kept_row,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    PICK: tl.constexpr,
    KEEP: tl.constexpr,
    KEEP_NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (row)."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    given = row
    if PICK:
        given = tl.load(pick + row)
    column = tl.arange(0, BLOCK)
    inside = column < width
    kind = normed.dtype.element_ty
    wide = tl.load(x + given * x_row + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + (given % PARTS) * width + column, mask=inside, other=0.0).to(tl.float32)
    if KEEP:
        goal = kept + tl.load(kept_at + row) * kept_row + column
    if ADD:
        wide += tl.load(residual + given * residual_row + column, mask=inside, other=0.0).to(tl.float32)
        wide = wide.to(kind).to(tl.float32)
    if ADD or PICK:
        tl.store(total + row * width + column, wide.to(kind), mask=inside)
    if KEEP and not KEEP_NORMED:
        tl.store(goal, wide.to(kind), mask=inside)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    made = (factor * wide.to(kind).to(tl.float32)).to(kind)
    tl.store(normed + row * width + column, made, mask=inside)
    if KEEP and KEEP_NORMED:
        tl.store(goal, made, mask=inside)


@triton.jit
def gated(gate, up, kind: tl.constexpr):
    """silu(gate) * up, of fp32."""
    return (tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(kind).to(tl.float32) * up).to(kind)


@triton.jit
def turned(left, right, cos, sin, angle, inside, HALF: tl.constexpr, kind: tl.constexpr):
    """Both halves of a head, fp32, turned by the angles that lie there."""
    one = left * tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    two = right * tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    before = one.to(kind).to(tl.float32) - two.to(kind).to(tl.float32)
    one = right * tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    two = left * tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    return before, one.to(kind).to(tl.float32) + two.to(kind).to(tl.float32)


@triton.jit
def _silu_mul(gate_up, out, width, gate_row, BLOCK: tl.constexpr):
    """Program (row, stretch)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    kind = out.dtype.element_ty
    gate = tl.load(gate_up + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_row + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, gated(gate, up, kind), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv,
    cos,
    sin,
    keys,
    values,
    slots,
    out,
    positions,
    qkv_row,
    turn_row,
    turns,
    key_head,
    key_row,
    value_head,
    value_row,
    LOOKED_UP: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (row, head of queries, keys or values)."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = D // 2
    dim = tl.arange(0, BLOCK)
    inside = dim < half
    start = qkv + row * qkv_row + head * D
    left = tl.load(start + dim, mask=inside, other=0.0)
    right = tl.load(start + half + dim, mask=inside, other=0.0)
    if head < HEADS + SHARED:
        turn = row * turn_row + dim
        if LOOKED_UP:
            turn = tl.minimum(tl.load(positions + row), turns - 1) * turn_row + dim
        kind = out.dtype.element_ty
        wide, other = turned(left.to(tl.float32), right.to(tl.float32), cos, sin, turn, inside, D // 2, kind)
        left, right = wide.to(kind), other.to(kind)
    if head < HEADS:
        target = out + (row * HEADS + head) * D
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if head < HEADS + SHARED:
            target = keys + (head - HEADS).to(tl.int64) * key_head + slot * key_row
        else:
            target = values + (head - HEADS - SHARED).to(tl.int64) * value_head + slot * value_row
    tl.store(target + dim, left, mask=inside)
    tl.store(target + half + dim, right, mask=inside)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pick: Tensor | None = None, keep: Keep | None = None
) -> tuple[Tensor, Tensor]:
    rows, width = len(x) if pick is None else len(pick), x.shape[1]
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    assert weight.is_contiguous() and (keep is None or (keep.rows.stride(1) == 1 and len(keep.at) == rows))
    normed = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    total = x if residual is None and pick is None else torch.empty_like(normed)
    other = x if residual is None else residual
    kept, at, _ = keep or (normed, x, False)
    block = power_of_two(width)
    _add_norm[(rows,)](
        x,
        other,
        weight,
        normed,
        total,
        x if pick is None else pick,
        kept,
        at,
        width,
        eps,
        x.stride(0),
        other.stride(0),
        kept.stride(0),
        ADD=residual is not None,
        PARTS=1 if weight.dim() == 1 else len(weight),
        PICK=pick is not None,
        KEEP=keep is not None,
        KEEP_NORMED=keep is not None and keep.normed,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        enable_fp_fusion=False,
        **follows(x),
    )
    return normed, total


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, -(-width // ACROSS))](
        gate_up, out, width, gate_up.stride(0), BLOCK=ACROSS, num_warps=4, enable_fp_fusion=False
    )
    return out


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    (rows, columns), (shared, _, width) = qkv.shape, keys.shape
    heads = columns // width - 2 * shared
    assert qkv.stride(1) == cos.stride(1) == sin.stride(1) == keys.stride(2) == values.stride(2) == 1
    assert cos.stride(0) == sin.stride(0) and width % 2 == 0
    out = torch.empty((rows, heads, width), dtype=qkv.dtype, device=qkv.device)
    _rotate_and_store[(rows, heads + 2 * shared)](
        qkv,
        cos,
        sin,
        keys,
        values,
        slots,
        out,
        slots if positions is None else positions,
        qkv.stride(0),
        cos.stride(0),
        len(cos),
        *keys.stride()[:2],
        *values.stride()[:2],
        LOOKED_UP=positions is not None,
        HEADS=heads,
        SHARED=shared,
        D=width,
        BLOCK=power_of_two(width // 2),
        num_warps=1,
        enable_fp_fusion=False,
        **follows(qkv),
    )
    return out
