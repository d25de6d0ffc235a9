"""Element-wise kernels that round like separate torch operations.

There is no fused multiply-add, and values are rounded to the model's dtype wherever eager code stores a result.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.norm_kinds import (
    LLAMA_NORM,
    LLAMA_ROTATION,
    Activation,
    HeadNorms,
    NormKind,
    NormStyle,
    Rotation,
)
from windfall.kernels.scatter import Scatter
from windfall.kernels.triton.pdl import pdl_wait

GATE_BLOCK = 1024  # columns per program of gate_mul
HEADS_AT_ONCE = 8  # per program of rotate_and_store
BLOCK = 1024  # elements per program of soft_cap and activate


@triton.jit
def _mean(wide, width, CENTRED: tl.constexpr):
    """What a norm subtracts from a row; elements past its width are 0."""
    if CENTRED:
        return tl.sum(wide, 0) / width
    return 0.0


@triton.jit
def _shrink(wide, mean, inside, width, eps, CENTRED: tl.constexpr):
    """The factor of a norm of a row; elements past its width are 0."""
    if CENTRED:
        wide = tl.where(inside, wide - mean, 0.0)
    return tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)


@triton.jit
def _scaled(
    wide, mean, shrink, factor, bias,
    kind: tl.constexpr, WIDE: tl.constexpr, ONE: tl.constexpr, CENTRED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """fp32 elements of a row, scaled by a norm and rounded; WIDE: only once, ONE: the factor is 1 + its weight."""
    if CENTRED:
        wide = wide - mean
    wide = wide * shrink
    factor = factor.to(tl.float32)
    if ONE:
        factor = 1.0 + factor
    if not WIDE:
        wide = wide.to(kind).to(tl.float32)
    wide = factor * wide
    if BIAS:
        wide += bias.to(tl.float32)
    return wide.to(kind)


@triton.jit
def _add_norm(
    x, residual, weight, bias, before, normed, total, pick, buffer, scatter_index, width, eps, x_scale, x_row,
    residual_row, buffer_row,
    ADD: tl.constexpr, BEFORE: tl.constexpr, SCALED: tl.constexpr, NORMED: tl.constexpr, PARALLEL: tl.constexpr,
    BIAS: tl.constexpr, WIDE: tl.constexpr, ONE: tl.constexpr, CENTRED: tl.constexpr, PARTS: tl.constexpr,
    PICK: tl.constexpr, SCATTER: tl.constexpr, SCATTER_NORMED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row). It loads weights before it waits, since no kernel writes them."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    kind = normed.dtype.element_ty
    given = row
    if NORMED and not PICK:
        factor = tl.load(weight + (row % PARTS) * width + column, mask=inside, other=0.0)
    offset = 0.0
    if BIAS:
        offset = tl.load(bias + column, mask=inside, other=0.0)
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
        mean = _mean(wide, width, CENTRED)
        shrink = _shrink(wide, mean, inside, width, eps, CENTRED)
        wide = _scaled(wide, mean, shrink, own, 0.0, kind, WIDE, ONE, CENTRED, False).to(tl.float32)
    if SCALED:
        wide = (wide * x_scale).to(kind).to(tl.float32)
    base = wide
    if ADD:
        stream = tl.load(residual + given * residual_row + column, mask=inside, other=0.0).to(tl.float32)
        wide += stream
        wide = wide.to(kind).to(tl.float32)
        base = wide
        if PARALLEL:
            base = stream
    if ADD or PICK:
        tl.store(total + row * width + column, wide.to(kind), mask=inside)
    if SCATTER and not SCATTER_NORMED:
        tl.store(goal, wide.to(kind), mask=inside)
    if NORMED:
        mean = _mean(base, width, CENTRED)
        shrink = _shrink(base, mean, inside, width, eps, CENTRED)
        made = _scaled(base, mean, shrink, factor, offset, kind, WIDE, ONE, CENTRED, BIAS)
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
def _gelu(x):
    """Its tanh form, of fp32."""
    inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))  # sqrt(2 / pi)
    return 0.5 * x * (1.0 + _tanh(inner))


@triton.jit
def gated(gate, up, kind: tl.constexpr, GELU: tl.constexpr = False):
    """silu(gate) * up, or gelu(gate) * up with its tanh form; both are fp32."""
    opened = _gelu(gate) if GELU else tl.div_rn(gate, 1.0 + tl.exp(-gate))
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
def _activate(x, count, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (block of elements)."""
    pdl_wait(PDL)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    given = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        made = _gelu(given)
    else:
        made = tl.where(given < 0, 0.0, given)  # keeps NaN
        made = made * made
    tl.store(x + place, made.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _heads_norm(first, count, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    """Means and factors of the norms of `count` elements from `first` on; all are [heads, 1]."""
    span = tl.arange(0, BLOCK)[None, :]
    inside = span < count
    wide = tl.load(first + span, mask=inside, other=0.0).to(tl.float32)
    mean = count * 0.0
    if CENTRED:
        mean = tl.sum(wide, 1, keep_dims=True) / count
        wide = tl.where(inside, wide - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / count + eps)


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, keys, values, slots, out, positions, query_norm, key_norm, eps, qkv_row, angle_row, angles,
    key_head, key_row, value_head, value_row,
    INDEXED: tl.constexpr, NORMED: tl.constexpr, JOINT: tl.constexpr, OWN: tl.constexpr, WIDE: tl.constexpr,
    ONE: tl.constexpr, CENTRED: tl.constexpr, ADJACENT: tl.constexpr, WIDE_TURN: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, AT_ONCE heads of queries, keys or values). The first ROTATED of a head's D dimensions are rotated.

    A norm sums the squares of a head. JOINT: those of all heads of its kind. OWN: each head has its own weights.
    """
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE))[:, None]
    asks, turns = head < HEADS, head < HEADS + KV_HEADS  # queries; queries and keys
    exists = head < HEADS + 2 * KV_HEADS
    half = ROTATED // 2
    place = tl.arange(0, BLOCK)[None, :]
    inside = exists & (place < half)
    dim, other = place, place + half
    if ADJACENT:
        dim, other = 2 * place, 2 * place + 1
    start = qkv + row * qkv_row + head * D
    left = tl.load(start + dim, mask=inside, other=0.0)
    right = tl.load(start + other, mask=inside, other=0.0)
    whole = tl.arange(0, BLOCK_D)[None, :]
    rest = exists & (whole >= ROTATED) & (whole < D)
    still = left
    if ROTATED < D:
        still = tl.load(start + whole, mask=rest, other=0.0)
    kind = out.dtype.element_ty
    if NORMED:
        factors = tl.where(asks, query_norm, key_norm)
        if OWN:
            factors += tl.where(asks, head, head - HEADS) * D
        first, count = start, head * 0 + D
        if JOINT:
            first = qkv + row * qkv_row + tl.where(asks, 0, HEADS * D)
            count = tl.where(asks, HEADS * D, KV_HEADS * D)
        mean, shrink = _heads_norm(first, count, eps, CENTRED, BLOCK_NORM)
        one = tl.load(factors + dim, mask=inside & turns, other=0.0)
        two = tl.load(factors + other, mask=inside & turns, other=0.0)
        one = _scaled(left.to(tl.float32), mean, shrink, one, 0.0, kind, WIDE, ONE, CENTRED, False)
        two = _scaled(right.to(tl.float32), mean, shrink, two, 0.0, kind, WIDE, ONE, CENTRED, False)
        left, right = tl.where(turns, one, left), tl.where(turns, two, right)
        if ROTATED < D:
            three = tl.load(factors + whole, mask=rest & turns, other=0.0)
            three = _scaled(still.to(tl.float32), mean, shrink, three, 0.0, kind, WIDE, ONE, CENTRED, False)
            still = tl.where(turns, three, still)
    if ROTATED > 0:
        angle = row * angle_row + place
        if INDEXED:
            angle = tl.maximum(tl.minimum(tl.load(positions + row), angles - 1), 0) * angle_row + place
        turn: tl.constexpr = tl.float32 if WIDE_TURN else kind
        one, two = rotated(left.to(tl.float32), right.to(tl.float32), cos, sin, angle, place < half, ROTATED // 2, turn)
        left, right = tl.where(turns, one.to(kind), left), tl.where(turns, two.to(kind), right)
    slot = tl.load(slots + row).to(tl.int64)
    wide_head = head.to(tl.int64)
    goal = out + (row * HEADS + wide_head) * D
    _store_heads(goal, left, right, still, dim, other, whole, inside & asks, rest & asks, ROTATED < D)
    goal = keys + (wide_head - HEADS) * key_head + slot * key_row
    is_key = turns & (asks == 0)
    _store_heads(goal, left, right, still, dim, other, whole, inside & is_key, rest & is_key, ROTATED < D)
    goal = values + (wide_head - HEADS - KV_HEADS) * value_head + slot * value_row
    is_value = turns == 0
    _store_heads(goal, left, right, still, dim, other, whole, inside & is_value, rest & is_value, ROTATED < D)


@triton.jit
def _store_heads(goal, left, right, still, dim, other, whole, inside, rest, PARTIAL: tl.constexpr):
    """Store both rotated halves of heads and, if PARTIAL, the dimensions that are not rotated."""
    tl.store(goal + dim, left, mask=inside)
    tl.store(goal + other, right, mask=inside)
    if PARTIAL:
        tl.store(goal + whole, still, mask=rest)


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    pick: Tensor | None = None,
    scatter: Scatter | None = None,
    style: NormStyle = LLAMA_NORM,
) -> tuple[Tensor, Tensor]:
    rows, width = len(x) if pick is None else len(pick), x.shape[1]
    before = style.before if isinstance(style.before, Tensor) else None
    assert residual is not None or (style.before is None and not style.parallel)
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    assert all(each is None or each.is_contiguous() for each in (weight, before, style.bias))
    assert scatter is None or (scatter.buffer.stride(1) == 1 and len(scatter.rows) == rows)
    assert weight is not None or (pick is None and scatter is None)
    if weight is None and residual is None:
        return x, x
    total = x if residual is None and pick is None else x.new_empty(rows, width)
    normed = total if weight is None else x.new_empty(rows, width)
    other = x if residual is None else residual
    buffer, at, _ = scatter or (normed, x, False)
    block = power_of_two(width)
    _add_norm[(rows,)](
        x,
        other,
        x if weight is None else weight,
        x if style.bias is None else style.bias,
        x if before is None else before,
        normed,
        total,
        x if pick is None else pick,
        buffer,
        at,
        width,
        eps,
        style.before if isinstance(style.before, float) else 1.0,
        x.stride(0),
        other.stride(0),
        buffer.stride(0),
        ADD=residual is not None,
        BEFORE=before is not None,
        SCALED=isinstance(style.before, float),
        NORMED=weight is not None,
        PARALLEL=style.parallel,
        BIAS=style.bias is not None,
        **_kind(style.kind),
        PARTS=1 if weight is None or weight.dim() == 1 else len(weight),
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
    return {
        "WIDE": kind is not NormKind.ROUNDED,
        "ONE": kind is NormKind.WIDE_PLUS_ONE,
        "CENTRED": kind is NormKind.CENTRED,
    }


def gate_mul(gate_up: Tensor, gelu: bool = False) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    options = {"BLOCK": GATE_BLOCK, "num_warps": 4, "enable_fp_fusion": False, **pdl_launch(gate_up)}
    _gate_mul[(rows, -(-width // GATE_BLOCK))](gate_up, out, width, gate_up.stride(0), GELU=gelu, **options)
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    assert x.is_contiguous()
    _soft_cap[(-(-x.numel() // BLOCK),)](x, x.numel(), cap, 1.0 / cap, **_elements(x))
    return x


def activate(x: Tensor, activation: Activation) -> Tensor:
    assert x.is_contiguous()
    _activate[(-(-x.numel() // BLOCK),)](x, x.numel(), GELU=activation is Activation.GELU, **_elements(x))
    return x


def _elements(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel whose programs have BLOCK elements each."""
    return {"BLOCK": BLOCK, "num_warps": 4, "enable_fp_fusion": False, **pdl_launch(x)}


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor | None = None,
    norms: HeadNorms | None = None,
    rotation: Rotation = LLAMA_ROTATION,
) -> Tensor:
    (rows, columns), (shared, _, width), rotated = qkv.shape, keys.shape, cos.shape[1]
    heads = columns // width - 2 * shared
    assert qkv.stride(1) == cos.stride(1) == sin.stride(1) == keys.stride(2) == values.stride(2) == 1
    assert cos.stride(0) == sin.stride(0) and rotated % 2 == 0
    out = torch.empty((rows, heads, width), dtype=qkv.dtype, device=qkv.device)
    joint = norms is not None and norms.joint
    block, at_once = power_of_two(heads * width if joint else width), 1 if joint else HEADS_AT_ONCE
    _rotate_and_store[(rows, -(-(heads + 2 * shared) // at_once))](
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
        0.0 if norms is None else norms.eps,
        qkv.stride(0),
        cos.stride(0),
        len(cos),
        *keys.stride()[:2],
        *values.stride()[:2],
        INDEXED=positions is not None,
        NORMED=norms is not None,
        JOINT=joint,
        OWN=norms is not None and norms.queries.numel() > width,
        **_kind(NormKind.ROUNDED if norms is None else norms.kind),
        ADJACENT=rotation.adjacent,
        WIDE_TURN=rotation.wide,
        HEADS=heads,
        KV_HEADS=shared,
        D=width,
        ROTATED=rotated,
        AT_ONCE=at_once,
        BLOCK=power_of_two(rotated // 2),
        BLOCK_D=power_of_two(width),
        BLOCK_NORM=block,
        num_warps=max(1, at_once * block // (1024 if joint else 256)),
        enable_fp_fusion=False,
        **pdl_launch(qkv),
    )
    return out
