"""Products with small weights, fused with the residual sum and norm before them and the operation after them.

A program computes some outputs of 16 rows. It issues all loads before it uses the first value, and loads its weight
before the previous kernel has finished: small weights are bound by latency, not by bandwidth. The order in which
products are summed does not depend on other rows; that of a norm's squares is the same for all passes with one tiling.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.triton.norm import gated, rotated
from windfall.kernels.triton.pdl import pdl_wait

ROWS = 16  # per program
MAX_ROWS = 64  # of a pass
MAX_PROGRAMS = 128  # about one per multiprocessor
OUTPUTS = (16, 32, 64, 128)  # per program
MAX_HELD = 320  # elements of the weight that a thread holds


class Tiling(NamedTuple):
    """The K elements of a row as two pieces whose sizes are powers of two; outputs and warps of a program."""

    first: int
    rest: int  # may reach past K
    outputs: int
    warps: int


def exact_tiling(rows: int, columns: int, k: int, memory: int, unit: int, normed: bool) -> Tiling | None:
    """A tiling with which a row has the same bits for any number of rows; the outputs of a program divide `unit`.

    Whether there is one depends on the weight alone. Norms are computed by four warps: the order in which their squares
    are summed depends on the number of warps, unlike that of the products.
    """
    first, rest = _pieces(k)
    warps = 4 if normed else 8
    elements = warps * 32 * MAX_HELD
    fitting = [
        outputs
        for outputs in OUTPUTS
        if unit % outputs == 0 and _fits(first + rest, outputs, elements, memory) and columns % outputs == 0
    ]
    if k < 16 or not fitting or columns // fitting[-1] > MAX_PROGRAMS:
        return None
    blocks = -(-rows // ROWS)
    outputs = next((each for each in fitting if columns // each * blocks <= MAX_PROGRAMS), fitting[-1])
    narrow = (first + rest) * outputs <= 4 * 32 * MAX_HELD
    return Tiling(first, rest, outputs, 4 if normed or narrow else 8)


def _pieces(k: int) -> tuple[int, int]:
    first = 1 << (k.bit_length() - 1)
    return first, max(power_of_two(k - first), 16) if k > first else 0


def _fits(k: int, outputs: int, elements: int, memory: int) -> bool:
    return k * outputs <= elements and 2 * k * (outputs + ROWS) <= memory  # two bytes per element


def choose_tiling(rows: int, columns: int, k: int, memory: int) -> Tiling | None:
    """The tiling of a product [rows, k] x [k, columns], with `memory` bytes of shared memory per program.

    None if the product is too large for these kernels.
    """
    if rows > MAX_ROWS or k < 16:
        return None
    blocks = -(-rows // ROWS)
    fitting = [outputs for outputs in OUTPUTS if columns % outputs == 0 and columns // outputs * blocks <= MAX_PROGRAMS]
    if not fitting:
        return None
    (first, rest), outputs = _pieces(k), fitting[0]
    warps = 4 if (first + rest) * outputs <= 4 * 32 * MAX_HELD else 8
    return Tiling(first, rest, outputs, warps) if _fits(first + rest, outputs, warps * 32 * MAX_HELD, memory) else None


@triton.jit
def _weight_piece(weight, column, START: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Elements from START on of these rows of the weight → [BLOCK, N], 0 past the end."""
    k = START + tl.arange(0, BLOCK)
    at = weight + column[None, :] * K + k[:, None]
    if START + BLOCK <= K:
        return tl.load(at)
    return tl.load(at, mask=(k < K)[:, None], other=0.0)


@triton.jit
def _residual_sum(
    x,
    residual,
    total,
    row,
    live,
    x_row,
    residual_row,
    START: tl.constexpr,
    K: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Elements from START on of x + residual → [M, BLOCK] fp32. The programs of the first outputs store the sum."""
    k = START + tl.arange(0, BLOCK)
    inside = live[:, None] & (k < K)[None, :]
    wide = tl.load(x + row[:, None] * x_row + k[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADD:
        kind = total.dtype.element_ty
        wide += tl.load(residual + row[:, None] * residual_row + k[None, :], mask=inside, other=0.0).to(tl.float32)
        sums = wide.to(kind)
        if tl.program_id(0) == 0:
            tl.store(total + row[:, None] * K + k[None, :], sums, mask=inside)
        wide = sums.to(tl.float32)
    return wide


@triton.jit
def _normed(wide, shrink, norm, kind: tl.constexpr, START: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """Scale by the norm's factors, rounding as separate operations would."""
    k = START + tl.arange(0, BLOCK)
    factor = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    return (factor[None, :] * (wide * shrink[:, None]).to(kind).to(tl.float32)).to(kind)


@triton.jit
def _weight_pieces(weight, column, K: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr):
    """Load both pieces of these rows of the weight. This is safe before `pdl_wait`, since no kernel writes weights."""
    near = _weight_piece(weight, column, 0, K, FIRST)
    far = near
    if REST > 0:
        far = _weight_piece(weight, column, FIRST, K, REST)
    return near, far


@triton.jit
def _normed_rows(
    x,
    residual,
    norm,
    total,
    row,
    live,
    x_row,
    residual_row,
    eps,
    kind: tl.constexpr,
    ADD: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
):
    """Both pieces of norm(x + residual); without a rest, the first one twice."""
    left = _residual_sum(x, residual, total, row, live, x_row, residual_row, 0, K, ADD, FIRST)
    squares = tl.sum(left * left, 1)
    if REST > 0:
        right = _residual_sum(x, residual, total, row, live, x_row, residual_row, FIRST, K, ADD, REST)
        squares += tl.sum(right * right, 1)
    shrink = tl.rsqrt(squares / K + eps)
    first = _normed(left, shrink, norm, kind, 0, K, FIRST)
    rest = first
    if REST > 0:
        rest = _normed(right, shrink, norm, kind, FIRST, K, REST)
    return first, rest


@triton.jit
def _product(
    x,
    residual,
    norm,
    total,
    near,
    far,
    row,
    live,
    x_row,
    residual_row,
    eps,
    ADD: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
):
    """The product of norm(x + residual) and both pieces of a weight → [M, N] fp32."""
    left, right = _normed_rows(
        x, residual, norm, total, row, live, x_row, residual_row, eps, near.dtype, ADD, K, FIRST, REST
    )
    sums = tl.dot(left, near)
    if REST > 0:
        sums = tl.dot(right, far, sums)
    return sums


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x,
    residual,
    norm,
    total,
    out,
    rows,
    x_row,
    residual_row,
    eps,
    ADD: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (0, block of rows)."""
    row = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    live = row < rows
    pdl_wait(PDL)
    kind = out.dtype.element_ty
    left, right = _normed_rows(x, residual, norm, total, row, live, x_row, residual_row, eps, kind, ADD, K, FIRST, REST)
    k = tl.arange(0, FIRST)
    tl.store(out + row[:, None] * K + k[None, :], left, mask=live[:, None])
    if REST > 0:
        k = FIRST + tl.arange(0, REST)
        tl.store(out + row[:, None] * K + k[None, :], right, mask=live[:, None] & (k < K)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    out,
    rows,
    width,
    x_row,
    BIAS: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of outputs, block of rows)."""
    column = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    live = row < rows
    near, far = _weight_pieces(weight, column, K, FIRST, REST)
    pdl_wait(PDL)
    k = tl.arange(0, FIRST)
    left = tl.load(x + row[:, None] * x_row + k[None, :], mask=live[:, None], other=0.0)
    if REST > 0:
        k = FIRST + tl.arange(0, REST)
        right = tl.load(x + row[:, None] * x_row + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
    sums = tl.dot(left, near)
    if REST > 0:
        sums = tl.dot(right, far, sums)
    if BIAS:
        sums += tl.load(bias + column).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * width + column[None, :], sums.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _even_and_odd(sums, M: tl.constexpr, N: tl.constexpr):
    """Split into even and odd columns."""
    return tl.split(tl.reshape(sums, (M, N // 2, 2)))


@triton.jit(do_not_specialize=["rows"])
def _norm_gate(
    x,
    residual,
    norm,
    weight,
    total,
    out,
    rows,
    width,
    x_row,
    residual_row,
    eps,
    ADD: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of gates, block of rows). Columns alternate between gate and up projection."""
    lane = tl.arange(0, N)
    column = tl.program_id(0) * (N // 2) + lane // 2 + lane % 2 * width
    row = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    live = row < rows
    kind = out.dtype.element_ty
    near, far = _weight_pieces(weight, column, K, FIRST, REST)
    pdl_wait(PDL)
    sums = _product(x, residual, norm, total, near, far, row, live, x_row, residual_row, eps, ADD, K, FIRST, REST)
    gate, up = _even_and_odd(sums.to(kind).to(tl.float32), M, N)
    goal = tl.program_id(0) * (N // 2) + tl.arange(0, N // 2)
    tl.store(out + row[:, None] * width + goal[None, :], gated(gate, up, kind), mask=live[:, None])


@triton.jit(do_not_specialize=["rows"])
def _norm_rotate(
    x,
    residual,
    norm,
    weight,
    bias,
    total,
    cos,
    sin,
    keys,
    values,
    slots,
    out,
    rows,
    x_row,
    residual_row,
    angle_row,
    key_head,
    key_row,
    value_head,
    value_row,
    eps,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of a head of queries, keys or values, block of rows). Columns alternate between both halves."""
    HALF: tl.constexpr = D // 2
    PARTS: tl.constexpr = D // N
    head = tl.program_id(0) // PARTS
    first = tl.program_id(0) % PARTS * (N // 2)
    lane = tl.arange(0, N)
    column = head * D + first + lane // 2 + lane % 2 * HALF
    row = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    live = row < rows
    near, far = _weight_pieces(weight, column, K, FIRST, REST)
    pdl_wait(PDL)
    slot = tl.load(slots + row, mask=live, other=0).to(tl.int64)
    sums = _product(x, residual, norm, total, near, far, row, live, x_row, residual_row, eps, ADD, K, FIRST, REST)
    if BIAS:
        sums += tl.load(bias + column).to(tl.float32)[None, :]
    kind = out.dtype.element_ty
    left, right = _even_and_odd(sums.to(kind).to(tl.float32), M, N)
    dim = first + tl.arange(0, N // 2)
    shown = live[:, None]
    if head < HEADS + KV_HEADS:
        angle = row[:, None] * angle_row + dim[None, :]
        left, right = rotated(left, right, cos, sin, angle, shown, HALF, kind)
    if head < HEADS:
        goal = out + ((row * HEADS + head) * D)[:, None]
    elif head < HEADS + KV_HEADS:
        goal = keys + ((head - HEADS).to(tl.int64) * key_head + slot * key_row)[:, None]
    else:
        goal = values + ((head - HEADS - KV_HEADS).to(tl.int64) * value_head + slot * value_row)[:, None]
    tl.store(goal + dim[None, :], left.to(kind), mask=shown)
    tl.store(goal + HALF + dim[None, :], right.to(kind), mask=shown)


def _options(x: Tensor, tiling: Tiling) -> dict[str, Any]:
    """Launch options of all three kernels."""
    return {
        "K": x.shape[1],
        "FIRST": tiling.first,
        "REST": tiling.rest,
        "M": ROWS,
        "N": tiling.outputs,
        "num_warps": tiling.warps,
        "enable_fp_fusion": False,
        **pdl_launch(x),
    }


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, out: Tensor | None = None) -> Tensor:
    rows, width = len(x), len(weight)
    out = x.new_empty(rows, width) if out is None else out
    assert x.stride(1) == 1 and weight.is_contiguous() and out.is_contiguous() and out.shape == (rows, width)
    given = (x, weight, weight if bias is None else bias, out, rows, width, x.stride(0))
    _linear[(width // tiling.outputs, -(-rows // ROWS))](*given, BIAS=bias is not None, **_options(x, tiling))
    return out


def add_norm(x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), with the roundings of the fused kernels with this tiling."""
    rows, other = len(x), x if residual is None else residual
    assert x.stride(1) == other.stride(1) == 1 and norm.is_contiguous()
    total, out = x if residual is None else x.new_empty(x.shape), x.new_empty(x.shape)
    options = _options(x, tiling)
    del options["N"]
    given = (x, other, norm, total, out, rows, x.stride(0), other.stride(0), eps)
    _norm[(1, -(-rows // ROWS))](*given, ADD=residual is not None, **options)
    return out, total


def norm_gate(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Tensor, tiling: Tiling
) -> tuple[Tensor, Tensor]:
    rows, width = len(x), len(weight) // 2
    other = x if residual is None else residual
    assert x.stride(1) == other.stride(1) == 1 and weight.is_contiguous() and norm.is_contiguous()
    total = x if residual is None else x.new_empty(x.shape)
    out = x.new_empty(rows, width)
    _norm_gate[(2 * width // tiling.outputs, -(-rows // ROWS))](
        x,
        other,
        norm,
        weight,
        total,
        out,
        rows,
        width,
        x.stride(0),
        other.stride(0),
        eps,
        ADD=residual is not None,
        **_options(x, tiling),
    )
    return out, total


def norm_rotate(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    tiling: Tiling,
) -> tuple[Tensor, Tensor]:
    rows, (shared, _, width) = len(x), keys.shape
    heads, other = len(weight) // width - 2 * shared, x if residual is None else residual
    assert x.stride(1) == other.stride(1) == cos.stride(1) == sin.stride(1) == keys.stride(2) == values.stride(2) == 1
    assert cos.stride(0) == sin.stride(0) and weight.is_contiguous() and norm.is_contiguous()
    total = x if residual is None else x.new_empty(x.shape)
    out = x.new_empty(rows, heads, width)
    _norm_rotate[(len(weight) // tiling.outputs, -(-rows // ROWS))](
        x,
        other,
        norm,
        weight,
        weight if bias is None else bias,
        total,
        cos,
        sin,
        keys,
        values,
        slots,
        out,
        rows,
        x.stride(0),
        other.stride(0),
        cos.stride(0),
        *keys.stride()[:2],
        *values.stride()[:2],
        eps,
        ADD=residual is not None,
        BIAS=bias is not None,
        HEADS=heads,
        KV_HEADS=shared,
        D=width,
        **_options(x, tiling),
    )
    return out, total
