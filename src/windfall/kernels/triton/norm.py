"""Element-wise kernels that round like separate torch operations.

There is no fused multiply-add, and values are rounded to the model's dtype wherever eager code stores a result.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.norm_kinds import HeadNorms, NormKind
from windfall.kernels.scatter import Scatter
from windfall.kernels.triton.pdl import pdl_wait

GATE_BLOCK = 512  # columns per program of gate_mul
CAP_BLOCK = 1024  # elements per program of soft_cap


@triton.jit
def _shrink(wide, width, eps):
    """The factor of a root-mean-square norm of a row; elements past its width are 0."""
    return tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)


@triton.jit
def _scaled(wide, shrink, factor, kind: tl.constexpr, WIDE: tl.constexpr, ONE: tl.constexpr):
    """fp32 elements of a row, scaled by a norm and rounded; WIDE: only once, ONE: the factor is 1 + its weight."""
    wide = wide * shrink
    factor = factor.to(tl.float32)
    if ONE:
        factor = 1.0 + factor
    if not WIDE:
        wide = wide.to(kind).to(tl.float32)
    return (factor * wide).to(kind)


@triton.jit
def _add_norm(
    x,
    residual,
    weight,
    before,
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
    BEFORE: tl.constexpr,
    WIDE: tl.constexpr,
    ONE: tl.constexpr,
    PARTS: tl.constexpr,
    PICK: tl.constexpr,
    SCATTER: tl.constexpr,
    SCATTER_NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row). It loads weights before it waits, since no kernel writes them."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    kind = normed.dtype.element_ty
    given = row
    if not PICK:
        factor = tl.load(weight + (row % PARTS) * width + column, mask=inside, other=0.0)
    if BEFORE:
        own = tl.load(before + column, mask=inside, other=0.0)
    pdl_wait(PDL)
    if PICK:
        given = tl.load(pick + row)
        factor = tl.load(weight + (given % PARTS) * width + column, mask=inside, other=0.0)
    wide = tl.load(x + given * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if SCATTER:
        goal = buffer + tl.load(scatter_index + row) * buffer_row + column
    if BEFORE:
        wide = _scaled(wide, _shrink(wide, width, eps), own, kind, WIDE, ONE).to(tl.float32)
    if ADD:
        wide += tl.load(residual + given * residual_row + column, mask=inside, other=0.0).to(tl.float32)
        wide = wide.to(kind).to(tl.float32)
    if ADD or PICK:
        tl.store(total + row * width + column, wide.to(kind), mask=inside)
    if SCATTER and not SCATTER_NORMED:
        tl.store(goal, wide.to(kind), mask=inside)
    made = _scaled(wide, _shrink(wide, width, eps), factor, kind, WIDE, ONE)
    tl.store(normed + row * width + column, made, mask=inside)
    if SCATTER and SCATTER_NORMED:
        tl.store(goal, made, mask=inside)


@triton.jit
def _tanh(x):
    """Of fp32: a power series near 0, where the other form loses digits."""
    square = x * x
    series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    fall = tl.exp(-2.0 * tl.abs(x))
    far = tl.div_rn(1.0 - fall, 1.0 + fall)
    return tl.where(square < 0.0625, x * series, tl.where(x < 0, -far, far))


@triton.jit
def gated(gate, up, kind: tl.constexpr, GELU: tl.constexpr = False):
    """silu(gate) * up, or gelu(gate) * up with its tanh form; both are fp32."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * (gate * gate * gate))  # sqrt(2 / pi)
        opened = 0.5 * gate * (1.0 + _tanh(inner))
    else:
        opened = tl.div_rn(gate, 1.0 + tl.exp(-gate))
    return (opened.to(kind).to(tl.float32) * up).to(kind)


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
def _gate_mul(gate_up, out, width, gate_row, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row, block of columns)."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    kind = out.dtype.element_ty
    gate = tl.load(gate_up + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_row + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, gated(gate, up, kind, GELU), mask=inside)


@triton.jit
def _soft_cap(x, count, cap, inverse, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (block of elements). torch divides by a number on a GPU as it multiplies by its inverse."""
    pdl_wait(PDL)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    kind = x.dtype.element_ty
    inner = (tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * inverse).to(kind)
    made = _tanh(inner.to(tl.float32)).to(kind).to(tl.float32) * cap
    tl.store(x + place, made.to(kind), mask=inside)


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
    query_norm,
    key_norm,
    width,
    eps,
    qkv_row,
    angle_row,
    angles,
    key_head,
    key_row,
    value_head,
    value_row,
    INDEXED: tl.constexpr,
    NORMED: tl.constexpr,
    WIDE: tl.constexpr,
    ONE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, head of queries, keys or values). The first ROTATED of a head's D dimensions are rotated.

    A norm sums the squares of a head in one vector, as `_add_norm` does, for the same rounding.
    """
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = ROTATED // 2
    dim = tl.arange(0, BLOCK)
    inside = dim < half
    start = qkv + row * qkv_row + head * D
    left = tl.load(start + dim, mask=inside, other=0.0)
    right = tl.load(start + half + dim, mask=inside, other=0.0)
    whole = tl.arange(0, BLOCK_D)
    kind = out.dtype.element_ty
    if head < HEADS + KV_HEADS:
        if NORMED:
            wide = tl.load(start + whole, mask=whole < D, other=0.0).to(tl.float32)
            shrink = _shrink(wide, width, eps)
            factors = query_norm
            if head >= HEADS:
                factors = key_norm
            one = tl.load(factors + dim, mask=inside, other=0.0)
            two = tl.load(factors + half + dim, mask=inside, other=0.0)
            left = _scaled(left.to(tl.float32), shrink, one, kind, WIDE, ONE)
            right = _scaled(right.to(tl.float32), shrink, two, kind, WIDE, ONE)
        angle = row * angle_row + dim
        if INDEXED:
            angle = tl.maximum(tl.minimum(tl.load(positions + row), angles - 1), 0) * angle_row + dim
        turned, other = rotated(left.to(tl.float32), right.to(tl.float32), cos, sin, angle, inside, ROTATED // 2, kind)
        left, right = turned.to(kind), other.to(kind)
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
    if ROTATED < D:
        rest = (whole >= ROTATED) & (whole < D)
        tl.store(target + whole, tl.load(start + whole, mask=rest), mask=rest)


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    pick: Tensor | None = None,
    scatter: Scatter | None = None,
    kind: NormKind = NormKind.ROUNDED,
    before: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, width = len(x) if pick is None else len(pick), x.shape[1]
    assert before is None or (residual is not None and before.is_contiguous())
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
        weight if before is None else before,
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
        BEFORE=before is not None,
        **_kind(kind),
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


def _kind(kind: NormKind) -> dict[str, bool]:
    """The constants of a kernel for this kind of norm."""
    return {"WIDE": kind is not NormKind.ROUNDED, "ONE": kind is NormKind.WIDE_PLUS_ONE}


def gate_mul(gate_up: Tensor, gelu: bool = False) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    options = {"BLOCK": GATE_BLOCK, "num_warps": 4, "enable_fp_fusion": False, **pdl_launch(gate_up)}
    _gate_mul[(rows, -(-width // GATE_BLOCK))](gate_up, out, width, gate_up.stride(0), GELU=gelu, **options)
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    assert x.is_contiguous()
    options = {"BLOCK": CAP_BLOCK, "num_warps": 4, "enable_fp_fusion": False, **pdl_launch(x)}
    _soft_cap[(-(-x.numel() // CAP_BLOCK),)](x, x.numel(), cap, 1.0 / cap, **options)
    return x


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    (rows, columns), (shared, _, width), rotated = qkv.shape, keys.shape, cos.shape[1]
    heads = columns // width - 2 * shared
    assert qkv.stride(1) == cos.stride(1) == sin.stride(1) == keys.stride(2) == values.stride(2) == 1
    assert cos.stride(0) == sin.stride(0) and rotated % 2 == 0 and (norms is None or rotated == width)
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
        qkv if norms is None else norms.queries,
        qkv if norms is None else norms.keys,
        width,
        0.0 if norms is None else norms.eps,
        qkv.stride(0),
        cos.stride(0),
        len(cos),
        *keys.stride()[:2],
        *values.stride()[:2],
        INDEXED=positions is not None,
        NORMED=norms is not None,
        **_kind(NormKind.ROUNDED if norms is None else norms.kind),
        HEADS=heads,
        KV_HEADS=shared,
        D=width,
        ROTATED=rotated,
        BLOCK=power_of_two(rotated // 2),
        BLOCK_D=power_of_two(width),
        num_warps=1,
        enable_fp_fusion=False,
        **pdl_launch(qkv),
    )
    return out
