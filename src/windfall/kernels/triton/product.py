"""Products with small weights, in one kernel with the stream's sum and norm before and what is done with the outputs.

A program has 16 rows and some outputs, and asks for all it needs before it uses any of it, for its weight even before
the kernel ahead of it has ended: small weights are a matter of latency, not of bandwidth. Products are added in the
same order, whatever rows are beside a row; a norm's squares are among passes of the same form.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, power_of_two
from windfall.kernels.triton.chain import begin
from windfall.kernels.triton.norm import gated, turned

ROWS = 16  # of a program
MOST = 64  # rows of a pass
PROGRAMS = 128  # at the most: about one for each multiprocessor
OUTPUTS = (16, 32, 64, 128)  # of a program
HELD = 320  # numbers of the weight that a thread holds, at the most


class Form(NamedTuple):
    """A row's numbers in two pieces, powers of two; a program's outputs and its warps."""

    first: int
    rest: int  # the second piece may be longer than what is left
    outputs: int
    warps: int


def form(rows: int, columns: int, k: int, memory: int) -> Form | None:
    """How this many rows of k numbers meet this many columns, by programs that share so many bytes each; None: not in
    this way."""
    if rows > MOST or k < 16:
        return None
    blocks = -(-rows // ROWS)
    fitting = [outputs for outputs in OUTPUTS if columns % outputs == 0 and columns // outputs * blocks <= PROGRAMS]
    if not fitting:
        return None
    first = 1 << (k.bit_length() - 1)
    rest = max(power_of_two(k - first), 16) if k > first else 0
    outputs = fitting[0]
    numbers = (first + rest) * outputs
    warps = 4 if numbers <= 4 * 32 * HELD else 8
    if numbers > warps * 32 * HELD or 2 * (first + rest) * (outputs + ROWS) > memory:  # two bytes a number
        return None
    return Form(first, rest, outputs, warps)


@triton.jit
def _weights(weight, column, START: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK, N]: numbers from START on of these rows of the weight, 0 behind the last."""
    k = START + tl.arange(0, BLOCK)
    at = weight + column[None, :] * K + k[:, None]
    if START + BLOCK <= K:
        return tl.load(at)
    return tl.load(at, mask=(k < K)[:, None], other=0.0)


@triton.jit
def _stream(
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
    """[M, BLOCK] fp32: numbers from START on of these rows' sums; the programs of the first outputs keep them."""
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
    k = START + tl.arange(0, BLOCK)
    factor = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    return (factor[None, :] * (wide * shrink[:, None]).to(kind).to(tl.float32)).to(kind)


@triton.jit
def _both(weight, column, K: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr):
    """The two pieces of these rows of the weight, before anything is waited for: no kernel writes a weight."""
    near = _weights(weight, column, 0, K, FIRST)
    far = near
    if REST > 0:
        far = _weights(weight, column, FIRST, K, REST)
    return near, far


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
    """norm(x + residual) with both pieces of a weight: [M, N] fp32."""
    left = _stream(x, residual, total, row, live, x_row, residual_row, 0, K, ADD, FIRST)
    squares = tl.sum(left * left, 1)
    if REST > 0:
        right = _stream(x, residual, total, row, live, x_row, residual_row, FIRST, K, ADD, REST)
        squares += tl.sum(right * right, 1)
    shrink = tl.rsqrt(squares / K + eps)
    sums = tl.dot(_normed(left, shrink, norm, near.dtype, 0, K, FIRST), near)
    if REST > 0:
        sums = tl.dot(_normed(right, shrink, norm, near.dtype, FIRST, K, REST), far, sums)
    return sums


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
    CHAINED: tl.constexpr,
):
    """Program (stretch of outputs, block of rows)."""
    column = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    live = row < rows
    near, far = _both(weight, column, K, FIRST, REST)
    begin(CHAINED)
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
def _pairs(sums, M: tl.constexpr, N: tl.constexpr):
    """Even and odd columns."""
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
    CHAINED: tl.constexpr,
):
    """Program (stretch of gates, block of rows). Columns are gates and what they gate by turns."""
    lane = tl.arange(0, N)
    column = tl.program_id(0) * (N // 2) + lane // 2 + lane % 2 * width
    row = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    live = row < rows
    kind = out.dtype.element_ty
    near, far = _both(weight, column, K, FIRST, REST)
    begin(CHAINED)
    sums = _product(x, residual, norm, total, near, far, row, live, x_row, residual_row, eps, ADD, K, FIRST, REST)
    gate, up = _pairs(sums.to(kind).to(tl.float32), M, N)
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
    turn_row,
    key_head,
    key_row,
    value_head,
    value_row,
    eps,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (stretch of a head of queries, keys or values, block of rows). Columns are of both halves by turns."""
    HALF: tl.constexpr = D // 2
    PARTS: tl.constexpr = D // N
    head = tl.program_id(0) // PARTS
    first = tl.program_id(0) % PARTS * (N // 2)
    lane = tl.arange(0, N)
    column = head * D + first + lane // 2 + lane % 2 * HALF
    row = tl.program_id(1).to(tl.int64) * M + tl.arange(0, M)
    live = row < rows
    near, far = _both(weight, column, K, FIRST, REST)
    begin(CHAINED)
    slot = tl.load(slots + row, mask=live, other=0).to(tl.int64)
    sums = _product(x, residual, norm, total, near, far, row, live, x_row, residual_row, eps, ADD, K, FIRST, REST)
    if BIAS:
        sums += tl.load(bias + column).to(tl.float32)[None, :]
    kind = out.dtype.element_ty
    left, right = _pairs(sums.to(kind).to(tl.float32), M, N)
    dim = first + tl.arange(0, N // 2)
    shown = live[:, None]
    if head < HEADS + SHARED:
        angle = row[:, None] * turn_row + dim[None, :]
        left, right = turned(left, right, cos, sin, angle, shown, HALF, kind)
    if head < HEADS:
        goal = out + ((row * HEADS + head) * D)[:, None]
    elif head < HEADS + SHARED:
        goal = keys + ((head - HEADS).to(tl.int64) * key_head + slot * key_row)[:, None]
    else:
        goal = values + ((head - HEADS - SHARED).to(tl.int64) * value_head + slot * value_row)[:, None]
    tl.store(goal + dim[None, :], left.to(kind), mask=shown)
    tl.store(goal + HALF + dim[None, :], right.to(kind), mask=shown)


def _options(x: Tensor, chosen: Form) -> dict[str, Any]:
    return {
        "K": x.shape[1],
        "FIRST": chosen.first,
        "REST": chosen.rest,
        "M": ROWS,
        "N": chosen.outputs,
        "num_warps": chosen.warps,
        "enable_fp_fusion": False,
        **follows(x),
    }


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Form) -> Tensor:
    rows, width = len(x), len(weight)
    assert x.stride(1) == 1 and weight.is_contiguous()
    out = x.new_empty(rows, width)
    given = (x, weight, weight if bias is None else bias, out, rows, width, x.stride(0))
    _linear[(width // chosen.outputs, -(-rows // ROWS))](*given, BIAS=bias is not None, **_options(x, chosen))
    return out


def norm_gate(
    x: Tensor, residual: Tensor | None, norm: Tensor, eps: float, weight: Tensor, chosen: Form
) -> tuple[Tensor, Tensor]:
    rows, width = len(x), len(weight) // 2
    other = x if residual is None else residual
    assert x.stride(1) == other.stride(1) == 1 and weight.is_contiguous() and norm.is_contiguous()
    total = x if residual is None else x.new_empty(x.shape)
    out = x.new_empty(rows, width)
    _norm_gate[(2 * width // chosen.outputs, -(-rows // ROWS))](
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
        **_options(x, chosen),
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
    chosen: Form,
) -> tuple[Tensor, Tensor]:
    rows, (shared, _, width) = len(x), keys.shape
    heads, other = len(weight) // width - 2 * shared, x if residual is None else residual
    assert x.stride(1) == other.stride(1) == cos.stride(1) == sin.stride(1) == keys.stride(2) == values.stride(2) == 1
    assert cos.stride(0) == sin.stride(0) and weight.is_contiguous() and norm.is_contiguous()
    total = x if residual is None else x.new_empty(x.shape)
    out = x.new_empty(rows, heads, width)
    _norm_rotate[(len(weight) // chosen.outputs, -(-rows // ROWS))](
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
        SHARED=shared,
        D=width,
        **_options(x, chosen),
    )
    return out, total
