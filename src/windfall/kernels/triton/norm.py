"""Element-wise kernels that round like separate torch operations.

There is no fused multiply-add, and values are rounded to the model's dtype wherever eager code stores a result.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.scatter import Scatter
from windfall.kernels.triton.pdl import pdl_wait

SILU_BLOCK = 512  # columns per program of silu_mul


@triton.jit
def _add_norm(
    x,
    residual,
    weight,
    normed,
    total,
    pick,
    buffer,
    scatter_index,
    width,
    eps,
    x_row,
    residual_row,
    buffer_row,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    PICK: tl.constexpr,
    SCATTER: tl.constexpr,
    SCATTER_NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row)."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    given = row
    if PICK:
        given = tl.load(pick + row)
    column = tl.arange(0, BLOCK)
    inside = column < width
    kind = normed.dtype.element_ty
    wide = tl.load(x + given * x_row + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + (given % PARTS) * width + column, mask=inside, other=0.0).to(tl.float32)
    if SCATTER:
        goal = buffer + tl.load(scatter_index + row) * buffer_row + column
    if ADD:
        wide += tl.load(residual + given * residual_row + column, mask=inside, other=0.0).to(tl.float32)
        wide = wide.to(kind).to(tl.float32)
    if ADD or PICK:
        tl.store(total + row * width + column, wide.to(kind), mask=inside)
    if SCATTER and not SCATTER_NORMED:
        tl.store(goal, wide.to(kind), mask=inside)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    made = (factor * wide.to(kind).to(tl.float32)).to(kind)
    tl.store(normed + row * width + column, made, mask=inside)
    if SCATTER and SCATTER_NORMED:
        tl.store(goal, made, mask=inside)


@triton.jit
def gated(gate, up, kind: tl.constexpr):
    """silu(gate) * up; both are fp32."""
    return (tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(kind).to(tl.float32) * up).to(kind)


@triton.jit
def rotated(left, right, cos, sin, angle, inside, HALF: tl.constexpr, kind: tl.constexpr):
    """Rotary embedding of both halves of a head in fp32; `angle` holds the offsets into cos and sin."""
    one = left * tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    two = right * tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    before = one.to(kind).to(tl.float32) - two.to(kind).to(tl.float32)
    one = right * tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    two = left * tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    return before, one.to(kind).to(tl.float32) + two.to(kind).to(tl.float32)


@triton.jit
def _silu_mul(gate_up, out, width, gate_row, BLOCK: tl.constexpr):
    """Program (row, block of columns)."""
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
    angle_row,
    angles,
    key_head,
    key_row,
    value_head,
    value_row,
    INDEXED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, head of queries, keys or values)."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = D // 2
    dim = tl.arange(0, BLOCK)
    inside = dim < half
    start = qkv + row * qkv_row + head * D
    left = tl.load(start + dim, mask=inside, other=0.0)
    right = tl.load(start + half + dim, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        angle = row * angle_row + dim
        if INDEXED:
            angle = tl.minimum(tl.load(positions + row), angles - 1) * angle_row + dim
        kind = out.dtype.element_ty
        wide, other = rotated(left.to(tl.float32), right.to(tl.float32), cos, sin, angle, inside, D // 2, kind)
        left, right = wide.to(kind), other.to(kind)
    if head < HEADS:
        target = out + (row * HEADS + head) * D
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if head < HEADS + KV_HEADS:
            target = keys + (head - HEADS).to(tl.int64) * key_head + slot * key_row
        else:
            target = values + (head - HEADS - KV_HEADS).to(tl.int64) * value_head + slot * value_row
    tl.store(target + dim, left, mask=inside)
    tl.store(target + half + dim, right, mask=inside)


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    pick: Tensor | None = None,
    scatter: Scatter | None = None,
) -> tuple[Tensor, Tensor]:
    rows, width = len(x) if pick is None else len(pick), x.shape[1]
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    assert weight.is_contiguous() and (scatter is None or (scatter.buffer.stride(1) == 1 and len(scatter.rows) == rows))
    normed = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    total = x if residual is None and pick is None else torch.empty_like(normed)
    other = x if residual is None else residual
    buffer, at, _ = scatter or (normed, x, False)
    block = power_of_two(width)
    _add_norm[(rows,)](
        x,
        other,
        weight,
        normed,
        total,
        x if pick is None else pick,
        buffer,
        at,
        width,
        eps,
        x.stride(0),
        other.stride(0),
        buffer.stride(0),
        ADD=residual is not None,
        PARTS=1 if weight.dim() == 1 else len(weight),
        PICK=pick is not None,
        SCATTER=scatter is not None,
        SCATTER_NORMED=scatter is not None and scatter.normed,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        enable_fp_fusion=False,
        **pdl_launch(x),
    )
    return normed, total


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, -(-width // SILU_BLOCK))](
        gate_up, out, width, gate_up.stride(0), BLOCK=SILU_BLOCK, num_warps=4, enable_fp_fusion=False
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
        INDEXED=positions is not None,
        HEADS=heads,
        KV_HEADS=shared,
        D=width,
        BLOCK=power_of_two(width // 2),
        num_warps=1,
        enable_fp_fusion=False,
        **pdl_launch(qkv),
    )
    return out
