"""Flash decoding over a tree: the queries that share a key head share its keys, which are split over programs.

A row's result does not depend on the number of other rows. The size of a split depends on the capacity, and the size of
a block of keys on the head's width. Blocks start at multiples of their size and are processed in ascending order. Tiles
have 16 or 32 rows, with four warps along the keys; both heights use the same matrix instruction and sum in the same
order. The result also does not depend on which of the visible rows are committed or staged, or on which program
combines the splits, since splits are combined in ascending order.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.triton.counters import COUNTERS, counters
from windfall.kernels.triton.pdl import pdl_wait, prefetch

UNSPLIT = 512  # up to this capacity there is one split
MIN_SPLIT = 128  # keys
MAX_PROGRAMS = 256  # per block of rows, for all key heads: about two per multiprocessor
LOG2_E = 1.4426950408889634
MAX_PDL_WIDTH = 1024  # heads * d up to which dependent launch pays: the previous kernel is short


class Tile(NamedTuple):
    """Rows and keys of a program's tile, its warps, and its software pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _softmax_step(q, k, v, seen, scale, top, total, sums, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Add one block of keys to the online softmax; top, total [M] and sums [M, D] are fp32."""
    scores = tl.dot(q, k, input_precision=PRECISION)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # no visible key so far
    weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
    return higher, total, sums


@triton.jit
def _store_result(target, sums, total, shown):
    """Normalise and store."""
    result = sums / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(target, result.to(target.dtype.element_ty), mask=shown)


@triton.jit
def _store_partial(tops, totals, partials, place, dims, top, total, sums, live, shown, D: tl.constexpr):
    """Store the softmax of one split, for the program that combines the splits."""
    tl.store(tops + place, top, mask=live)
    tl.store(totals + place, total, mask=live)
    tl.store(partials + place[:, None] * D + dims[None, :], sums, mask=shown)


@triton.jit
def _load_partial(tops, totals, partials, at, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load what another program stored: sums [BLOCK_M, BLOCK_D], maximum score and total weight of each row."""
    dims = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (dims < D)[None, :]
    part = tl.load(partials + at[:, None] * D + dims[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    level = tl.load(tops + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    return part, level, tl.load(totals + at, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def _merge_partials(
    tops,
    totals,
    partials,
    place,
    live,
    heads,
    rows,
    needed,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Combine the softmaxes of `needed` splits in ascending order; place [BLOCK_M]: of each row in the first split."""
    split = tl.arange(0, SPLITS)
    step = heads * rows
    made = (split < needed)[:, None] & live[None, :]
    known = tl.load(tops + split[:, None] * step + place[None, :], mask=made, other=float("-inf"), cache_modifier=".cg")
    highest = tl.max(known, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    whole = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(0, needed, UNROLL):
        parts, levels, weights = (), (), ()
        for ahead in tl.static_range(UNROLL):  # issue all loads before the first result is used
            there = live & (0 * place + start + ahead < needed)  # compares vectors, since masks are vectors
            at = (start + ahead) * step + place
            part, level, weight = _load_partial(tops, totals, partials, at, there, D, BLOCK_D)
            parts += (part,)
            levels += (level,)
            weights += (weight,)
        for ahead in tl.static_range(UNROLL):
            share = tl.exp2(levels[ahead] - base)
            whole = tl.fma(share, weights[ahead], whole)
            sums = tl.fma(parts[ahead], tl.broadcast_to(share[:, None], [BLOCK_M, BLOCK_D]), sums)
    return whole, sums


@triton.jit(do_not_specialize=["rows", "staged", "capacity", "size", "window", "mask_row"])
def _attend(
    queries,
    keys,
    values,
    length_at,
    mask,
    positions,
    out,
    tops,
    totals,
    partials,
    counters,
    scale,
    rows,
    staged,
    capacity,
    size,
    window,
    query_row,
    query_head,
    key_head,
    key_row,
    value_head,
    value_row,
    mask_row,
    mask_column,
    out_row,
    out_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOWED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of rows, key head, split). Row m is query m // GROUP of head GROUP * key head + m % GROUP.

    With several splits, each program stores its part; with LAST, the last program to finish combines all parts.
    """
    head = tl.program_id(1)
    split = tl.program_id(2)
    first = split * size
    length = tl.load(length_at).to(tl.int32)  # the previous kernel writes neither this nor committed rows
    if PDL:
        for start in range(first, tl.minimum(first + size, length), BLOCK_N):
            column = tl.minimum(start + tl.arange(0, BLOCK_N), length - 1).to(tl.int64)
            prefetch(keys + head.to(tl.int64) * key_head + column * key_row)
            prefetch(values + head.to(tl.int64) * value_head + column * value_row)
    pdl_wait(PDL)
    end = tl.minimum(length + staged, capacity)
    if first >= end:
        return
    last = tl.minimum(first + size, end)

    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    node = row // GROUP
    query = head * GROUP + row % GROUP
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    within = dims < D
    live = row < rows
    place = node[:, None].to(tl.int64) * query_row + query[:, None] * query_head + dims[None, :]
    q = tl.load(queries + place, mask=live[:, None] & within[None, :], other=0.0)
    keys += head.to(tl.int64) * key_head
    values += head.to(tl.int64) * value_head

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    whole = tl.maximum(tl.minimum(length // BLOCK_N * BLOCK_N, last), first)  # all keys before this are committed
    if WINDOWED:  # no row sees a key before this block, since all positions are at least `length`
        oldest = tl.load(positions + node, mask=live, other=0).to(tl.int32) - window + 1  # first key of each row
        first = tl.minimum(tl.maximum(first, tl.maximum(length - window + 1, 0) // BLOCK_N * BLOCK_N), whole)
    for start in tl.range(first, whole, BLOCK_N):
        column = start + columns
        if BLOCK_D == D:
            k = tl.load(keys + column[None, :] * key_row + dims[:, None])
            v = tl.load(values + column[:, None] * value_row + dims[None, :])
        else:
            k = tl.load(keys + column[None, :] * key_row + dims[:, None], mask=within[:, None], other=0.0)
            v = tl.load(values + column[:, None] * value_row + dims[None, :], mask=within[None, :], other=0.0)
        if WINDOWED:
            recent = column[None, :] >= oldest[:, None]
            top, total, sums = _softmax_step(q, k, v, recent, scale, top, total, sums, True, PRECISION)
        else:
            top, total, sums = _softmax_step(q, k, v, live[:, None], scale, top, total, sums, False, PRECISION)
    for start in tl.range(whole, last, BLOCK_N, num_stages=1):
        column = start + columns
        used = column < last
        k = tl.load(keys + column[None, :] * key_row + dims[:, None], mask=within[:, None] & used[None, :], other=0.0)
        v = tl.load(
            values + column[:, None] * value_row + dims[None, :], mask=used[:, None] & within[None, :], other=0.0
        )
        stage = column - length
        asked = live[:, None] & (used & (stage >= 0))[None, :]
        allowed = tl.load(mask + node[:, None] * mask_row + stage[None, :] * mask_column, mask=asked, other=0)
        # A reduction over one element, which hides the mask's bytes from Triton. Otherwise the product with the values
        # would sum keys in another order: Triton chooses it by the narrowest type that it can trace back to.
        allowed = tl.max(allowed.to(tl.int32)[:, :, None], 2)
        seen = (used & (stage < 0))[None, :]
        if WINDOWED:
            seen = seen & (column[None, :] >= oldest[:, None])
        seen = (allowed != 0) | seen
        top, total, sums = _softmax_step(q, k, v, seen, scale, top, total, sums, True, PRECISION)

    heads = tl.num_programs(1)
    place = head * rows + row
    target = node[:, None].to(tl.int64) * out_row + query[:, None] * out_head + dims[None, :]
    shown = live[:, None] & within[None, :]
    if SPLITS == 1:
        _store_result(out + target, sums, total, shown)
    elif LAST:
        if end <= size:
            _store_result(out + target, sums, total, shown)
        else:
            _store_partial(tops, totals, partials, split * heads * rows + place, dims, top, total, sums, live, shown, D)
            counter = counters + tl.program_id(0) * heads + head
            tl.debug_barrier()  # all threads have stored their part before the atomic releases it
            before = tl.atomic_add(counter, 1, sem="release", scope="gpu")
            tl.debug_barrier()
            needed = (end + size - 1) // size
            if before == needed - 1:
                weight, mixed = _merge_partials(
                    tops, totals, partials, place, live, heads, rows, needed, D, SPLITS, BLOCK_M, BLOCK_D, UNROLL
                )
                _store_result(out + target, mixed, weight, shown)
                tl.store(counter, 0)  # for the next launch
    else:
        _store_partial(tops, totals, partials, split * heads * rows + place, dims, top, total, sums, live, shown, D)


@triton.jit(do_not_specialize=["rows", "staged", "capacity", "size"])
def _combine(
    tops,
    totals,
    partials,
    length_at,
    out,
    rows,
    staged,
    capacity,
    size,
    out_row,
    out_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Program (row, key head): combine the softmaxes of the splits."""
    row = tl.program_id(0) + tl.arange(0, 1)
    head = tl.program_id(1)
    end = tl.minimum(tl.load(length_at).to(tl.int32) + staged, capacity)
    dims = tl.arange(0, BLOCK_D)
    live = row < rows
    heads = tl.num_programs(1)
    needed = (end + size - 1) // size
    weight, mixed = _merge_partials(
        tops, totals, partials, head * rows + row, live, heads, rows, needed, D, SPLITS, 1, BLOCK_D, UNROLL
    )
    query = head * GROUP + row % GROUP
    target = (row // GROUP)[:, None].to(tl.int64) * out_row + query[:, None] * out_head + dims[None, :]
    _store_result(out + target, mixed, weight, live[:, None] & (dims < D)[None, :])


def tile(rows: int, width: int, dtype: torch.dtype) -> Tile:
    """The tile for this many rows. Their number changes the tile's height, but not how a row is computed."""
    if dtype == torch.float32:  # no matrix instruction: the same tile for all
        return Tile(16, 32, 4, 2) if width <= 64 else Tile(16, 16, 8, 2)
    return Tile(16 if rows <= 32 else 32, 64, 4, 3)


def chunk(capacity: int, key_heads: int) -> int:
    """Keys per split, such that a full cache gives at most MAX_PROGRAMS programs; independent of the rows."""
    if capacity <= UNSPLIT:
        return power_of_two(capacity)
    return max(MIN_SPLIT, power_of_two(-(-capacity * key_heads // MAX_PROGRAMS)))


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    mask: Tensor,
    scale: float,
    out: Tensor,
    shape: Tile | None = None,
    size: int | None = None,
    last: bool = True,
    positions: Tensor | None = None,
    window: int | None = None,
) -> None:
    """`tree_attention` into `out`; `shape` and `size` (a split's keys, a multiple of the tile's) are for measuring.

    With `last`, the last program of a block of rows combines its splits, instead of a second kernel. Both give the same
    bits.
    """
    (count, heads, width), (shared, capacity, _) = queries.shape, keys.shape
    assert queries.stride(2) == keys.stride(2) == values.stride(2) == out.stride(2) == 1
    rows = count * heads // shared
    shape = tile(rows, width, queries.dtype) if shape is None else shape
    size = max(chunk(capacity, shared) if size is None else size, shape.keys)
    splits = -(-capacity // size)
    tops = torch.empty((2, splits, shared, rows), device=out.device) if splits > 1 else out
    partials = torch.empty((splits, shared, rows, width), device=out.device) if splits > 1 else out
    block_d = max(power_of_two(width), 16)
    unroll = 8 if block_d <= 64 else 4
    mask = mask.view(torch.uint8)
    blocks = -(-rows // shape.rows)
    counts = counters(out.device) if last and splits > 1 and blocks * shared <= COUNTERS else None
    _attend[(blocks, shared, splits)](
        queries,
        keys,
        values,
        length,
        mask,
        length if positions is None else positions,
        out,
        tops[0],
        tops[-1],
        partials,
        length if counts is None else counts,
        scale * LOG2_E,  # softmax in powers of two
        rows,
        mask.shape[1],
        capacity,
        size,
        window or 0,
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        *mask.stride(),
        *out.stride()[:2],
        GROUP=heads // shared,
        D=width,
        SPLITS=power_of_two(splits),
        LAST=counts is not None,
        BLOCK_M=shape.rows,
        BLOCK_N=shape.keys,
        BLOCK_D=block_d,
        UNROLL=unroll,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        WINDOWED=positions is not None and window is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **(pdl_launch(out) if heads * width <= MAX_PDL_WIDTH else {"PDL": False}),
    )
    if splits > 1 and counts is None:
        _combine[(rows, shared)](
            tops[0],
            tops[1],
            partials,
            length,
            out,
            rows,
            mask.shape[1],
            capacity,
            size,
            *out.stride()[:2],
            GROUP=heads // shared,
            D=width,
            SPLITS=power_of_two(splits),
            BLOCK_D=block_d,
            UNROLL=unroll,
            num_warps=1,
        )
