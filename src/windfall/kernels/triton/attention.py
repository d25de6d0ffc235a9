"""Flash decoding over a tree: the rows of one key head's queries share its keys, which are split over programs.

A row's result does not depend on how many rows are beside it: the split is a function of the capacity, the block of
keys one of the head's width, and blocks are taken in ascending order from multiples of their size. Tiles are 16 or 32
rows high with four warps side by side along the keys, which is the same matrix instruction and the same order of every
sum for both. Nor does it depend on which of the rows it sees are committed and which staged, nor on which program
combines the splits: that is done in ascending order.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, power_of_two
from windfall.kernels.triton.chain import begin, fetch

UNSPLIT = 512  # capacities up to this are read by one program for each head and block of rows: nothing to combine
LEAST_CHUNK = 128  # keys a program should have at least
PROGRAMS = 256  # for all key heads together, however long the cache: two for each multiprocessor
NARROW = 1024  # queries of a row, at the most, for which the kernel before is so short that waiting for it pays
COUNTERS = 4096  # blocks of rows times key heads, at the most, whose last program combines the splits


class Tile(NamedTuple):
    """How many rows and keys a program works on at a time, with how many warps, loading how far ahead."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _absorb(q, k, v, seen, scale, top, total, sums, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One block of keys into the running softmax; top, total [M] and sums [M, D] are fp32."""
    scores = tl.dot(q, k, input_precision=PRECISION)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen so far
    weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
    return higher, total, sums


@triton.jit
def _finish(target, sums, total, shown):
    result = sums / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(target, result.to(target.dtype.element_ty), mask=shown)


@triton.jit
def _leave(tops, totals, partials, place, dims, top, total, sums, live, shown, D: tl.constexpr):
    """A split's part, for whoever combines them."""
    tl.store(tops + place, top, mask=live)
    tl.store(totals + place, total, mask=live)
    tl.store(partials + place[:, None] * D + dims[None, :], sums, mask=shown)


@triton.jit
def _partial(tops, totals, partials, at, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """What another program left at these places: sums [BLOCK_M, BLOCK_D], their highest score and their weight."""
    dims = tl.arange(0, BLOCK_D)
    inside = there[:, None] & (dims < D)[None, :]
    part = tl.load(partials + at[:, None] * D + dims[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    level = tl.load(tops + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    return part, level, tl.load(totals + at, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def _merged(
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
    """The softmaxes of `needed` splits into one, in ascending order; place [BLOCK_M]: of each row in the first."""
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
        for ahead in tl.static_range(UNROLL):  # all are on their way before the first is needed
            there = live & (0 * place + start + ahead < needed)  # a vector's comparison: masks are vectors
            at = (start + ahead) * step + place
            part, level, weight = _partial(tops, totals, partials, at, there, D, BLOCK_D)
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
    CHAINED: tl.constexpr,
):
    """Program (block of rows, key head, split). Row m is query m // GROUP of head GROUP * key head + m % GROUP.

    With several splits each leaves its part behind, and with LAST the last of them to do so combines them all.
    """
    head = tl.program_id(1)
    split = tl.program_id(2)
    first = split * size
    length = tl.load(length_at).to(tl.int32)  # neither this nor committed rows are written by the kernel just before
    if CHAINED:
        for start in range(first, tl.minimum(first + size, length), BLOCK_N):
            column = tl.minimum(start + tl.arange(0, BLOCK_N), length - 1).to(tl.int64)
            fetch(keys + head.to(tl.int64) * key_head + column * key_row)
            fetch(values + head.to(tl.int64) * value_head + column * value_row)
    begin(CHAINED)
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

    whole = tl.maximum(tl.minimum(length // BLOCK_N * BLOCK_N, last), first)  # up to here every key is committed
    if WINDOWED:  # no row sees anything before this block: none stands before the end of the committed rows
        oldest = tl.load(positions + node, mask=live, other=0).to(tl.int32) - window + 1  # that each row sees
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
            top, total, sums = _absorb(q, k, v, recent, scale, top, total, sums, True, PRECISION)
        else:
            top, total, sums = _absorb(q, k, v, live[:, None], scale, top, total, sums, False, PRECISION)
    for start in tl.range(whole, last, BLOCK_N, num_stages=1):
        column = start + columns
        used = column < last
        k = tl.load(keys + column[None, :] * key_row + dims[:, None], mask=within[:, None] & used[None, :], other=0.0)
        v = tl.load(
            values + column[:, None] * value_row + dims[None, :], mask=used[:, None] & within[None, :], other=0.0
        )
        stage = column - length
        asked = live[:, None] & (used & (stage >= 0))[None, :]
        told = tl.load(mask + node[:, None] * mask_row + stage[None, :] * mask_column, mask=asked, other=0)
        # a reduction of nothing: behind the bytes of a mask the product with the values would take keys in another
        # order (Triton chooses it by the narrowest numbers that it can trace back to)
        told = tl.max(told.to(tl.int32)[:, :, None], 2)
        seen = (used & (stage < 0))[None, :]
        if WINDOWED:
            seen = seen & (column[None, :] >= oldest[:, None])
        seen = (told != 0) | seen
        top, total, sums = _absorb(q, k, v, seen, scale, top, total, sums, True, PRECISION)

    heads = tl.num_programs(1)
    place = head * rows + row
    target = node[:, None].to(tl.int64) * out_row + query[:, None] * out_head + dims[None, :]
    shown = live[:, None] & within[None, :]
    if SPLITS == 1:
        _finish(out + target, sums, total, shown)
    elif LAST:
        if end <= size:
            _finish(out + target, sums, total, shown)
        else:
            _leave(tops, totals, partials, split * heads * rows + place, dims, top, total, sums, live, shown, D)
            counter = counters + tl.program_id(0) * heads + head
            tl.debug_barrier()  # every thread's part is written before the one that counts releases it
            before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            tl.debug_barrier()
            needed = (end + size - 1) // size
            if before == needed - 1:
                weight, mixed = _merged(
                    tops, totals, partials, place, live, heads, rows, needed, D, SPLITS, BLOCK_M, BLOCK_D, UNROLL
                )
                _finish(out + target, mixed, weight, shown)
                tl.store(counter, 0)  # for the next launch
    else:
        _leave(tops, totals, partials, split * heads * rows + place, dims, top, total, sums, live, shown, D)


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
    """Program (row, key head): the splits' softmaxes into one."""
    row = tl.program_id(0) + tl.arange(0, 1)
    head = tl.program_id(1)
    end = tl.minimum(tl.load(length_at).to(tl.int32) + staged, capacity)
    dims = tl.arange(0, BLOCK_D)
    live = row < rows
    heads = tl.num_programs(1)
    needed = (end + size - 1) // size
    weight, mixed = _merged(
        tops, totals, partials, head * rows + row, live, heads, rows, needed, D, SPLITS, 1, BLOCK_D, UNROLL
    )
    query = head * GROUP + row % GROUP
    target = (row // GROUP)[:, None].to(tl.int64) * out_row + query[:, None] * out_head + dims[None, :]
    _finish(out + target, mixed, weight, live[:, None] & (dims < D)[None, :])


def tile(rows: int, width: int, dtype: torch.dtype) -> Tile:
    """Rows beside a row change how many a program takes, never how it treats one of them."""
    if dtype == torch.float32:  # no matrix instruction: the same tile for all
        return Tile(16, 32, 4, 2) if width <= 64 else Tile(16, 16, 8, 2)
    return Tile(16 if rows <= 32 else 32, 64, 4, 3)


def chunk(capacity: int, key_heads: int) -> int:
    """How many keys a split holds: whatever makes enough programs of a full cache, whichever rows look at it."""
    if capacity <= UNSPLIT:
        return power_of_two(capacity)
    return max(LEAST_CHUNK, power_of_two(-(-capacity * key_heads // PROGRAMS)))


_counters: dict[torch.device, Tensor] = {}


def counters(device: torch.device) -> Tensor | None:
    """Zeros that every launch leaves as zeros, for the one stream that attends on this device.

    None if they do not exist yet and a graph is being captured, in which they would be no zeros until it is replayed.
    """
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        _counters[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # once: whichever stream comes next sees the zeros
    return _counters[device]


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

    `last`: the last program of a block of rows combines its splits, rather than a second kernel; the same to the bit.
    """
    (count, heads, width), (shared, capacity, _) = queries.shape, keys.shape
    assert queries.stride(2) == keys.stride(2) == values.stride(2) == out.stride(2) == 1
    rows = count * heads // shared
    shape = tile(rows, width, queries.dtype) if shape is None else shape
    size = max(chunk(capacity, shared) if size is None else size, shape.keys)
    splits = -(-capacity // size)
    tops = torch.empty((2, splits, shared, rows), device=out.device) if splits > 1 else out
    partials = torch.empty((splits, shared, rows, width), device=out.device) if splits > 1 else out
    across = max(power_of_two(width), 16)
    unroll = 8 if across <= 64 else 4
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
        scale * 1.4426950408889634,  # softmax in powers of two
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
        BLOCK_D=across,
        UNROLL=unroll,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        WINDOWED=positions is not None and window is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **(follows(out) if heads * width <= NARROW else {"CHAINED": False}),
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
            BLOCK_D=across,
            UNROLL=unroll,
            num_warps=1,
        )
