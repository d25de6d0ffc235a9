"""A router, and a mixture of experts in four kernels whose shapes do not depend on which experts are chosen.

`_router` computes the logits of a row's experts. `_choose_experts` chooses the experts of each row, and lists the rows
of each expert in blocks. `_expert_gate_up` and `_expert_down` multiply a block of rows by some columns of their
expert's weight, so a weight is read once per block. `_sum_experts` adds the outputs of a row's experts, in descending
order of their logits.

A program of `_router` computes logits of one row. Every product of an expert is one sum over K, sixteen elements at a
time in ascending order (see matmul.py). Neither the tile nor a row's place in a block plays a part in this. So a row
has the same bits in every pass.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.expert_weights import Experts
from windfall.kernels.triton.norm import gated
from windfall.kernels.triton.pdl import pdl_wait, prefetch

STEP = 64  # elements of K that a program loads at a time
AHEAD = tl.constexpr(256)  # addresses that `_expert_down` prefetches before it waits
LINE, LINES = tl.constexpr(64), tl.constexpr(4)  # elements of a cache line, in half precision; lines of a row of these
CHOSEN_ROWS = 64  # rows whose experts are chosen at a time
SUM_COLUMNS = 1024  # per program of `_sum_experts`
ROUTED = 2  # experts of a program of `_router`


class Tile(NamedTuple):
    """Rows of a block, columns of the weight that a program reads, and how it runs."""

    rows: int
    columns: int
    stages: int  # of `_expert_gate_up`
    down_stages: int
    warps: int


@triton.jit
def _router(
    x, weight, bias, out, experts, x_row,
    BIAS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, ROUTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (experts, row). There are few outputs, so a matrix product would leave most multiprocessors idle."""
    expert = tl.program_id(0) * ROUTED + tl.arange(0, ROUTED)
    row = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    inside, known = k < K, expert < experts
    at = weight + expert[:, None] * K + k[None, :]
    own = tl.load(at, mask=known[:, None] & inside[None, :], other=0.0).to(tl.float32)
    pdl_wait(PDL)
    given = tl.load(x + row * x_row + k, mask=inside, other=0.0).to(tl.float32)
    sums = tl.sum(own * given[None, :], 1)
    if BIAS:
        sums += tl.load(bias + expert, mask=known, other=0.0).to(tl.float32)
    tl.store(out + row * experts + expert, sums.to(out.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["n", "room"])
def _choose_experts(
    logits, shares, pairs, counts, blocks, n, room, experts, logit_row,
    TOP_K: tl.constexpr, NORMALISED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, E: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program. Choose the experts of all rows; write the shares of a row's experts and the list of blocks.

    A pair is a row and one of its experts; its number is row * TOP_K + slot. The pairs of expert e stand in `pairs`
    from e * n on, in ascending order. A block is a place in `pairs` where up to ROWS pairs of one expert start, or -1.
    """
    pdl_wait(PDL)
    expert = tl.arange(0, E)
    known = (expert < experts)[None, :]
    count = tl.zeros([E], tl.int32)
    for first in tl.range(0, n, CHUNK):
        row = first + tl.arange(0, CHUNK)
        live = row < n
        at = logits + row[:, None].to(tl.int64) * logit_row + expert[None, :]
        value = tl.load(at, mask=live[:, None] & known, other=0.0).to(tl.float32)
        value = tl.where(value == value, value, float("inf"))  # a row with NaN is NaN in the end
        slot = tl.full([CHUNK, E], -1, tl.int32)
        powers = ()
        total = tl.zeros([CHUNK], tl.float32)
        for each in tl.static_range(TOP_K):
            free = known & (slot < 0)
            best = tl.max(tl.where(free, value, float("-inf")), 1)
            if each == 0:
                highest = best
            chosen = tl.min(tl.where(free & (value == best[:, None]), expert[None, :], E), 1)
            slot = tl.where(expert[None, :] == chosen[:, None], each, slot)
            power = tl.exp(best - highest)
            powers += (power,)
            total += power
        if not NORMALISED:
            total = tl.sum(tl.where(known, tl.exp(value - highest[:, None]), 0.0), 1)
        for each in tl.static_range(TOP_K):
            share = tl.div_rn(powers[each], total)
            tl.store(shares + row * TOP_K + each, share.to(shares.dtype.element_ty), mask=live)
        taken = ((slot >= 0) & live[:, None]).to(tl.int32)
        place = expert[None, :] * n + count[None, :] + tl.cumsum(taken, 0) - 1
        tl.store(pairs + place, row[:, None] * TOP_K + slot, mask=taken > 0)
        count += tl.sum(taken, 0)
    tl.store(counts + expert, count, mask=expert < experts)
    own = (count + ROWS - 1) // ROWS
    end = tl.cumsum(own, 0)
    for each in tl.range(0, tl.max(own, 0)):
        tl.store(blocks + end - own + each, expert * n + each * ROWS, mask=each < own)
    for first in tl.range(tl.sum(own, 0), room, 256):
        block = first + tl.arange(0, 256)
        tl.store(blocks + block, -1, mask=block < room)


@triton.jit
def _block_pairs(start, counts, pairs, n, ROWS: tl.constexpr):
    """The expert of a block, its pairs [ROWS], and which of these exist."""
    expert = start // n
    lane = tl.arange(0, ROWS)
    live = start - expert * n + lane < tl.load(counts + expert)
    return expert, tl.load(pairs + start + lane, mask=live, other=0), live


@triton.jit
def _product(
    x, weight, bias, row, live, column, inside, x_row,
    K: tl.constexpr, WIDTH: tl.constexpr, LINEAR: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """These rows of x times these columns of a weight, rounded; with a bias, that is added and rounded again → fp32.

    The weight is [K, WIDTH]; LINEAR: [WIDTH, K].
    """
    kind: tl.constexpr = x.dtype.element_ty
    K_STEP: tl.constexpr = 1 if LINEAR else WIDTH
    COLUMN_STEP: tl.constexpr = K if LINEAR else 1
    lane = tl.arange(0, STEP)
    x_at = x + row[:, None].to(tl.int64) * x_row + lane[None, :]
    weight_at = weight + lane[:, None] * K_STEP + column[None, :] * COLUMN_STEP
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.range(0, K, STEP, num_stages=STAGES):
        shown, read = live[:, None], inside[None, :]
        if K % STEP != 0:
            shown, read = shown & (k + lane < K)[None, :], read & (k + lane < K)[:, None]
        left = tl.load(x_at + k, mask=shown, other=0.0)
        if K % STEP == 0 and WIDTH % COLUMNS == 0:
            right = tl.load(weight_at + k * K_STEP)
        else:
            right = tl.load(weight_at + k * K_STEP, mask=read, other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    made = sums.to(kind).to(tl.float32)
    if BIAS:
        added = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        made = (made + added[None, :]).to(kind).to(tl.float32)
    return made


@triton.jit
def _clamped_swiglu(gate, up, alpha, limit, kind: tl.constexpr):
    """Rounded after every operation, as separate torch operations are; comparisons keep NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    scaled = (gate * alpha).to(kind).to(tl.float32)
    sigmoid = tl.div_rn(1.0, 1.0 + tl.exp(-scaled)).to(kind).to(tl.float32)
    return ((up + 1.0).to(kind).to(tl.float32) * (gate * sigmoid).to(kind).to(tl.float32)).to(kind)


@triton.jit(do_not_specialize=["n"])
def _expert_gate_up(
    x, weight, bias, out, blocks, counts, pairs, n, x_row, alpha, limit,
    TOP_K: tl.constexpr, LIMITED: tl.constexpr, LINEAR: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (block, tile of columns). Its columns alternate between gate and up projection, which in a LINEAR weight
    are halves. `out` has a row per pair."""
    pdl_wait(PDL)
    start = tl.load(blocks + tl.program_id(0))
    if start < 0:
        return
    expert, pair, live = _block_pairs(start, counts, pairs, n, ROWS)
    lane = tl.arange(0, COLUMNS)
    column = tl.program_id(1) * COLUMNS + lane
    inside = column < WIDTH
    if LINEAR:
        column = tl.program_id(1) * (COLUMNS // 2) + lane // 2 + lane % 2 * (WIDTH // 2)
    own = weight + expert.to(tl.int64) * (K * WIDTH)
    made = _product(
        x, own, bias + expert * WIDTH, pair // TOP_K, live, column, inside, x_row,
        K, WIDTH, LINEAR, BIAS, ROWS, COLUMNS, STEP, STAGES,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(made, (ROWS, COLUMNS // 2, 2)))
    goal = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    shown = live[:, None] & (goal < WIDTH // 2)[None, :]
    at = out + pair[:, None].to(tl.int64) * (WIDTH // 2) + goal[None, :]
    if LIMITED:
        opened = _clamped_swiglu(gate, up, alpha, limit, out.dtype.element_ty)
    else:
        opened = gated(gate, up, out.dtype.element_ty)
    tl.store(at, opened, mask=shown)


@triton.jit(do_not_specialize=["n"])
def _expert_down(
    inner, weight, bias, shares, out, blocks, counts, pairs, n,
    LINEAR: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block, tile of columns). `inner` and `out` have a row per pair.

    What `_choose_experts` wrote may be read before the wait, since `_expert_gate_up` has waited for it.
    """
    start = tl.load(blocks + tl.program_id(0), cache_modifier=".cg")
    expert = tl.maximum(start, 0) // n
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own = weight + expert.to(tl.int64) * (K * WIDTH)
    if PDL and start >= 0:
        ahead = tl.arange(0, AHEAD)
        if LINEAR:  # LINE elements of a row, and as many rows as there are left
            near = tl.minimum(tl.program_id(1) * COLUMNS + ahead // LINES, WIDTH - 1) * K
            prefetch(own + near + tl.minimum(ahead % LINES * LINE, K - 1))
        else:
            prefetch(own + tl.minimum(ahead, K - 1) * WIDTH + tl.program_id(1) * COLUMNS)
    pdl_wait(PDL)
    if start < 0:
        return
    expert, pair, live = _block_pairs(start, counts, pairs, n, ROWS)
    made = _product(
        inner, own, bias + expert * WIDTH, pair, live, column, column < WIDTH, K,
        K, WIDTH, LINEAR, BIAS, ROWS, COLUMNS, STEP, STAGES,
    )  # fmt: skip
    share = tl.load(shares + pair, mask=live, other=0.0).to(tl.float32)
    shown = live[:, None] & (column < WIDTH)[None, :]
    at = out + pair[:, None].to(tl.int64) * WIDTH + column[None, :]
    tl.store(at, (made * share[:, None]).to(out.dtype.element_ty), mask=shown)


@triton.jit
def _sum_experts(parts, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row, block of columns)."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(parts + row * TOP_K * width + column, mask=inside, other=0.0).to(tl.float32)
    for each in tl.static_range(1, TOP_K):
        total += tl.load(parts + (row * TOP_K + each) * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


def router(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, H] times weight [E, H] transposed, plus bias [E] → [n, E]. A row has the same bits in every pass."""
    (n, k), experts = x.shape, len(weight)
    assert x.stride(1) == 1 and weight.is_contiguous()
    out = x.new_empty(n, experts)
    _router[(-(-experts // ROUTED), n)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        experts,
        x.stride(0),
        BIAS=bias is not None,
        K=k,
        BLOCK_K=power_of_two(k),
        ROUTED=ROUTED,
        num_warps=4,
        enable_fp_fusion=False,
        **pdl_launch(x),
    )
    return out


def choose_tile(pairs: int, experts: int, half: bool) -> Tile:
    """The tile for this number of pairs, in half precision or fp32; it changes the speed and no bit."""
    if not half:
        return Tile(16, 64, 3, 3, 4)
    if pairs <= 16 * experts:
        return Tile(16, 64, 5, 7, 4)  # the down projection has fewer programs, so each has more loads in flight
    return Tile(32, 128, 4, 4, 4) if pairs <= 32 * experts else Tile(64, 128, 4, 4, 4)


def block_bound(pairs: int, experts: int, rows: int) -> int:
    """The largest number of blocks that this number of pairs can need."""
    return (pairs + (rows - 1) * min(experts, pairs)) // rows


class Blocks(NamedTuple):
    """The rows of each expert in blocks, as `_choose_experts` lists them, and the shares of a row's experts."""

    blocks: Tensor
    counts: Tensor
    pairs: Tensor
    shares: Tensor


def choose_experts(logits: Tensor, own: Experts, rows: int, dtype: torch.dtype) -> Blocks:
    """Choose the experts of each row of the router's logits, and list their rows in blocks of this size."""
    (n, experts), top_k = logits.shape, own.top_k
    room, few = block_bound(n * top_k, experts, rows), n <= 16
    sizes = (room, experts, experts * n)
    blocks, counts, pairs = (logits.new_empty(size, dtype=torch.int32) for size in sizes)
    shares = logits.new_empty(n * top_k, dtype=dtype)
    _choose_experts[(1,)](
        logits,
        shares,
        pairs,
        counts,
        blocks,
        n,
        room,
        experts,
        logits.stride(0),
        TOP_K=top_k,
        NORMALISED=own.normalised,
        ROWS=rows,
        CHUNK=16 if few else CHOSEN_ROWS,
        E=power_of_two(experts),
        num_warps=4 if few else 8,
        enable_fp_fusion=False,
        **pdl_launch(logits),
    )
    return Blocks(blocks, counts, pairs, shares)


def mixture(x: Tensor, logits: Tensor, own: Experts, tile: Tile | None = None) -> Tensor:
    """`kernels.experts.mixture`; `tile` is for measuring."""
    (n, hidden), experts = x.shape, len(own.gate_up)
    double, biased = own.gate_up.shape[1 if own.linear else 2], own.gate_up_bias is not None
    _check(x, logits, own, double)
    number = n * own.top_k
    tile = tile or choose_tile(number, experts, x.dtype != torch.float32)
    dtype = torch.float32 if own.wide else x.dtype
    blocks, counts, pairs, shares = choose_experts(logits, own, tile.rows, dtype)
    inner, out = x.new_empty(number, double // 2), x.new_empty(n, hidden)
    parts = x.new_empty(number, hidden, dtype=dtype)
    options = {
        "LINEAR": own.linear,
        "BIAS": biased,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STEP": STEP,
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
        **pdl_launch(x),
    }
    _expert_gate_up[(len(blocks), -(-double // tile.columns))](
        x,
        own.gate_up,
        own.gate_up_bias if biased else x,
        inner,
        blocks,
        counts,
        pairs,
        n,
        x.stride(0),
        own.alpha,
        own.limit or 0.0,
        TOP_K=own.top_k,
        LIMITED=own.limit is not None,
        K=hidden,
        WIDTH=double,
        STAGES=tile.stages,
        **options,
    )
    _expert_down[(len(blocks), -(-hidden // tile.columns))](
        inner,
        own.down,
        own.down_bias if biased else x,
        shares,
        parts,
        blocks,
        counts,
        pairs,
        n,
        K=double // 2,
        WIDTH=hidden,
        STAGES=tile.down_stages,
        **options,
    )
    _sum_experts[(n, -(-hidden // SUM_COLUMNS))](
        parts, out, hidden, TOP_K=own.top_k, BLOCK=SUM_COLUMNS, num_warps=4, enable_fp_fusion=False, **pdl_launch(x)
    )
    return out


def _check(x: Tensor, logits: Tensor, own: Experts, double: int) -> None:
    """Whether these operands are as the kernels read them; `double` is twice the width of an expert."""
    experts, hidden = len(own.gate_up), x.shape[1]
    sizes = (experts, hidden, double), (experts, double // 2, hidden)
    given = (
        own.gate_up.mT.shape if own.linear else own.gate_up.shape,
        own.down.mT.shape if own.linear else own.down.shape,
    )
    assert given == sizes and logits.shape == (len(x), experts) and 1 <= own.top_k <= experts
    assert x.stride(1) == logits.stride(1) == 1 and x.dtype == own.gate_up.dtype == own.down.dtype
    assert all(each is None or each.is_contiguous() for each in own[:4])
    assert (own.gate_up_bias is None) == (own.down_bias is None)
