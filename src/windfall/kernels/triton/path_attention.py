"""Attention of rows along their paths: a row's result depends only on the keys of its path, to the bit.

Keys are processed in the order of their positions, in blocks and parts whose limits depend on positions alone. The
softmax of each part is computed on its own, and then merged into that of the parts before it. All sums over keys are
matrix products, whose order does not depend on the tile's height. Therefore no sum depends on other rows, on the slots
of the row's ancestors, or on the capacity. Multiply-adds are not fused, since two compilations could otherwise fuse
them differently.

Where all rows find their keys in the same slots, a program computes adjacent parts for a tile of rows. In the parts in
which paths differ, a program computes one path after the other. The program with a row's first parts merges its own
parts as it goes. Others store theirs, and the last program to finish merges what was stored.

In a batch, the committed keys of a request lie in pages, which its page table lists. A block of keys is never longer
than a page, and both begin at multiples of their length, so that a block lies in one page.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.pages import PAGE_TOKENS, Pages, tile_rows
from windfall.kernels.triton.attention import LOG2_E, _load_partial, _store_partial, _store_result
from windfall.kernels.triton.counters import COUNTERS, counters
from windfall.kernels.triton.pdl import pdl_wait, prefetch

# Keys of a part, by zones of positions: few where most texts end, for many programs and short branching parts; more
# further on, for few parts to merge. All are powers of two, and a zone ends at a multiple of the next zone's parts.
NEAR, MIDDLE, FAR = tl.constexpr(64), tl.constexpr(256), tl.constexpr(1024)
NEAR_END, MIDDLE_END = tl.constexpr(1024), tl.constexpr(16_384)  # where zones end
NEAR_BITS, MIDDLE_BITS, FAR_BITS = (tl.constexpr(each.value.bit_length() - 1) for each in (NEAR, MIDDLE, FAR))
# The part of a position p is p // MIDDLE plus this number in the second zone, and so on in the third.
MIDDLE_SHIFT = tl.constexpr(NEAR_END.value // NEAR.value - NEAR_END.value // MIDDLE.value)
FAR_SHIFT = tl.constexpr(MIDDLE_SHIFT.value + MIDDLE_END.value // MIDDLE.value - MIDDLE_END.value // FAR.value)
# Programs for rows alone and for tiles, each: half of those that a GPU of 132 multiprocessors runs at the same time.
MAX_PROGRAMS_SMALL, MAX_PROGRAMS = 198, 132
SMALL_TILE, REGISTERS = 1024, 168  # sums up to which three programs run on a multiprocessor, and their registers
BATCH_SMALL_TILE = 2048  # the same for several requests
MANY_PROGRAMS, FEWER_REGISTERS = 396, 128  # of several requests: with more programs, four run at a time
# Partial sums that a program loads before it merges the first, for one request and for several.
MERGED, BATCH_MERGED = 8192, 2048
ONES = tl.constexpr(16)  # columns of the matrix that sums weights: the fewest of a matrix product
MAX_TILE = 8192  # sums that a program holds, of a part and of the parts before it each
MAX_WIDTH = 256  # of a head up to which a program's shared memory has room for blocks of 64 keys, with all stages
# Of several requests: for tiles of plain decoding, for tiles of trees, and for single rows.
BATCH_TILE_PROGRAMS, BATCH_TREE_PROGRAMS, BATCH_ROW_PROGRAMS = 528, 264, 528
FUSED_ROWS = True  # with many requests, a tile's program also computes the parts in which its rows' paths differ
# Stages of the loop over blocks of keys, for long chains and others. More of them leave less memory for a kernel that
# starts early.
CHAIN_STAGES, STAGES = 3, 2
LINE = tl.constexpr(64)  # elements of a cache line, in half precision
MAX_PARTS = tl.constexpr(65_536)  # of a row; see `_count_and_merge`


class Tile(NamedTuple):
    """Query rows and keys of a program's tile, its warps, and the stages of its loop over blocks of keys."""

    height: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _part_start(part):
    """The first position of a part."""
    start = (part - MIDDLE_SHIFT) * MIDDLE
    start = tl.where(start < MIDDLE_END, start, (part - FAR_SHIFT) * FAR)
    return tl.where(part * NEAR < NEAR_END, part * NEAR, start)


@triton.jit
def _part_of(position):
    """The part that this position belongs to; positions are not negative."""
    part = tl.where(position < MIDDLE_END, (position >> MIDDLE_BITS) + MIDDLE_SHIFT, (position >> FAR_BITS) + FAR_SHIFT)
    return tl.where(position < NEAR_END, position >> NEAR_BITS, part)


@triton.jit
def _tanh(x):
    """Of fp32, without overflow."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)  # 2 / ln 2


@triton.jit
def _softmax_step(
    q, k, v, seen, scale, inner, top, total, sums, CAPPED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Add one block of keys to the online softmax: top [M], total [M, ONES] (equal columns) and sums [M, D] are fp32.

    CAPPED: scores become tanh(inner * score), before they are multiplied by `scale`.
    """
    scores = tl.dot(q, k, input_precision=PRECISION)
    if CAPPED:
        scores = _tanh(scores * inner)
    scores = tl.where(seen, scores * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # no visible key so far
    weights = tl.exp2(scores - base[:, None]).to(v.dtype)
    shrink = tl.exp2(top - base)[:, None]
    total = tl.dot(weights, tl.full([BLOCK_N, ONES], 1.0, v.dtype), total * shrink, input_precision=PRECISION)
    sums = tl.dot(weights, v, sums * shrink, input_precision=PRECISION)
    return higher, total, sums


@triton.jit
def _add_sink(sinks, query, live, top, total, sums, SINKS: tl.constexpr):
    """Add a key without a value, whose score is that of the query's head."""
    if SINKS:
        sink = tl.load(sinks + query, mask=live, other=float("-inf")).to(tl.float32) * 1.4426950408889634  # log2(e)
        higher = tl.maximum(top, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(top - base)
        total = total * kept + tl.exp2(sink - base)
        sums = sums * kept[:, None]
    return total, sums


@triton.jit
def _load_parts(
    tops, totals, partials, place, step, first, last, live, early, D: tl.constexpr, BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Request the parts from `early` on: their sums, maxima and weights. Of those that are not a row's own, 0."""
    parts, levels, weights = (), (), ()
    for ahead in tl.static_range(UNROLL):
        there = live & (early + ahead >= first) & (early + ahead <= last)
        at = (early + ahead) * step + place
        part, level, weight = _load_partial(tops, totals, partials, at, there, D, BLOCK_D)
        parts += (part,)
        levels += (level,)
        weights += (weight,)
    return parts, levels, weights


@triton.jit
def _merge(top, weight, sums, level, more, part):
    """Merge the softmax of a part (level [M], more [M], part [M, D]) into that of the parts before it."""
    higher = tl.maximum(top, level)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    keep = tl.exp2(top - base)
    share = tl.exp2(level - base)
    return higher, weight * keep + more * share, sums * keep[:, None] + part * share[:, None]


@triton.jit
def _merge_parts(
    tops, totals, partials, place, step, first, last, live, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Merge what is stored of each row's parts first [BLOCK_M] to last [BLOCK_M], in ascending order.

    Parts that are not a row's own change nothing. place [BLOCK_M]: of each row in part 0; the next part is `step`
    further.
    """
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start = tl.min(tl.where(live, first, 1 << 30))
    end = tl.max(tl.where(live, last, -1)) + 1
    for early in tl.range(start, end, UNROLL):
        parts, levels, weights = _load_parts(
            tops, totals, partials, place, step, first, last, live, early, D, BLOCK_D, UNROLL
        )
        for ahead in tl.static_range(UNROLL):
            top, weight, sums = _merge(top, weight, sums, levels[ahead], weights[ahead], parts[ahead])
    return top, weight, sums


@triton.jit
def _count_and_merge(
    target, tops, totals, partials, counters, sinks, query, own, place, step, first_part, last_part, made, prefix,
    within, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Count parts of a row as done, and store its result if all of them are.

    This program has done `made` parts. It has merged the first `prefix` of them into the next one and stored that one
    in their place. A row's counter adds up `made` and MAX_PARTS * `prefix`.
    """
    tl.debug_barrier()  # all threads have stored their parts before the atomic releases them
    added = made + prefix * MAX_PARTS
    counted = tl.atomic_add(counters + place, added, mask=own, sem="release", scope="gpu") + added
    tl.debug_barrier()
    done = own & (counted % MAX_PARTS == last_part - first_part + 1)
    if tl.max(done.to(tl.int32)) > 0:
        first = first_part + counted // MAX_PARTS
        top, weight, sums = _merge_parts(
            tops, totals, partials, place, step, first, last_part, done, D, BLOCK_M, BLOCK_D, UNROLL
        )
        weight, sums = _add_sink(sinks, query, own, top, weight, sums, SINKS)
        _store_result(target, sums, weight, done[:, None] & within[None, :])
        tl.store(counters + place, 0, mask=done)  # for the next launch


@triton.jit
def _limits(part, own, reach, oldest, BLOCK_N: tl.constexpr):
    """The first position of the first block, and the end, of the keys that these rows see in a part."""
    start = tl.maximum(_part_start(part), tl.min(tl.where(own, oldest, 1 << 30)) // BLOCK_N * BLOCK_N)
    return start, tl.minimum(_part_start(part + 1), tl.max(tl.where(own, reach, 0)))


@triton.jit
def _request_of(row, owners, lengths, tables, table_row):
    """The committed rows of a row's request, and its page table."""
    owner = tl.load(owners + row)
    return tl.load(lengths + owner).to(tl.int32), tables + owner.to(tl.int64) * table_row


@triton.jit
def _committed_slots(at, limit, table, PAGED: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The slots of the block of positions that starts at `at`; those from `limit` on may be wrong."""
    start = at
    if PAGED:
        start = tl.load(table + at // PAGE, mask=at < limit, other=0) * PAGE + at % PAGE
    return start + tl.arange(0, BLOCK_N)


@triton.jit
def _path_slots(
    at, end, line, length, table, PAGED: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The slots of a row's path in the block of positions that starts at `at`; those from `end` on may be wrong.

    The positions before `length` are committed. `line` lists the slots of the others.
    """
    position = at + tl.arange(0, BLOCK_N)
    staged = tl.load(line + position - length, mask=(position >= length) & (position < end), other=0)
    committed = _committed_slots(at, tl.minimum(length, end), table, PAGED, PAGE, BLOCK_N)
    return tl.where(position < length, committed, staged)


@triton.jit
def _turns(lineage, lineage_row, node, first_row, rows, depth, live, ROWS: tl.constexpr):
    """In which turns a program computes the parts in which its rows' paths differ.

    A slot holds the key of one row, so a path that has the slot of a row has the whole path of this row. Rows of one
    path therefore share a turn, and read the slots of its last row. Returns the place of this last row for each row
    [M], the places of all last rows, four bits for each turn, and the number of turns. depth [M]: keys of each row's
    path that are not committed.
    """
    tl.static_assert(ROWS <= 16)
    staged = live & (depth > 0)
    own = tl.load(lineage + node.to(tl.int64) * lineage_row + depth - 1, mask=staged, other=-1)
    last = node - first_row
    for place in tl.static_range(1, ROWS):
        row = tl.minimum(first_row + place, first_row + rows - 1)
        line = lineage + row.to(tl.int64) * lineage_row
        # all members of a row have its depth; lines are not defined beyond it
        own_depth = tl.max(tl.where(live & (node == row), depth, 0))
        slot = tl.load(line + depth - 1, mask=staged & (depth <= own_depth), other=-2)
        last = tl.where((slot == own) & (place < rows) & (place > last), place, last)
    turns = first_row * 0
    places = turns.to(tl.int64)
    for place in tl.static_range(ROWS):
        found = tl.max((live & (last == place)).to(tl.int32))
        places += (found * place).to(tl.int64) << (4 * turns)
        turns += found
    return last, places, turns


@triton.jit
def _block_step(
    q, keys, values, slot, at, end, rows, reach, oldest, scale, inner, top, total, sums, key_row, value_row,
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys in these slots, those of the block of positions at `at`, to the softmax of these rows."""
    dims = tl.arange(0, BLOCK_D)
    within = dims < D
    position = at + tl.arange(0, BLOCK_N)
    used = position < end
    k_at = keys + slot[None, :] * key_row + dims[:, None]
    v_at = values + slot[:, None] * value_row + dims[None, :]
    k = tl.load(k_at, mask=within[:, None] & used[None, :], other=0.0)
    v = tl.load(v_at, mask=used[:, None] & within[None, :], other=0.0)
    seen = (position[None, :] < reach[:, None]) & (position[None, :] >= oldest[:, None]) & rows[:, None]
    return _softmax_step(q, k, v, seen, scale, inner, top, total, sums, CAPPED, PRECISION, BLOCK_N)


@triton.jit
def _begin_block(at, top, total, sums):
    """The part of the block at this position, and the state of the softmax, which starts anew with each part."""
    at = tl.maximum(at, 0)
    part = _part_of(at)
    fresh = at == _part_start(part)
    return part, tl.where(fresh, float("-inf"), top), tl.where(fresh, 0.0, total), tl.where(fresh, 0.0, sums)


@triton.jit
def _attend_rows(
    queries, keys, values, owners, lengths, tables, lineage, out, tops, totals, partials, counters, sinks, scale, inner,
    length, node, query, own, reach, oldest, first_part, last_part, first_row, last, places, turns, nodes, part,
    table_row, query_row, query_head, key_row, value_row, lineage_row, out_row, out_head,
    PAGED: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """One part of some rows whose keys lie in different slots, in one turn for each path."""
    if tl.max(own.to(tl.int32)) > 0:
        dims = tl.arange(0, BLOCK_D)
        within = dims < D
        asked = queries + node[:, None].to(tl.int64) * query_row + query[:, None] * query_head + dims[None, :]
        q = tl.load(asked, mask=own[:, None] & within[None, :], other=0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M, ONES], tl.float32)
        sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for turn in tl.range(0, turns, num_stages=1):
            path_end = (places >> (4 * turn) & 15).to(tl.int32)
            active = own & (last == path_end)  # other rows do not change in this turn
            start, end = _limits(part, active, reach, oldest, BLOCK_N)
            line = lineage + (first_row + path_end) * lineage_row
            table = tables
            if PAGED:
                length, table = _request_of(first_row + path_end, owners, lengths, tables, table_row)
            for at in tl.range(start, end, BLOCK_N):
                slot = _path_slots(at, end, line, length, table, PAGED, PAGE, BLOCK_N)
                top, total, sums = _block_step(
                    q, keys, values, slot, at, end, active, reach, oldest, scale, inner, top, total, sums, key_row,
                    value_row, D, BLOCK_N, BLOCK_D, CAPPED, PRECISION,
                )  # fmt: skip
        empty_top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # merged as a tile's first part is
        empty_sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        weight = tl.max(total, 1)  # the columns are equal
        top, weight, sums = _merge(empty_top, tl.zeros([BLOCK_M], tl.float32), empty_sums, top, weight, sums)
        target = out + node[:, None].to(tl.int64) * out_row + query[:, None] * out_head + dims[None, :]
        whole = own & (first_part == last_part)
        if tl.max(whole.to(tl.int32)) > 0:
            weight_and_sink, mixed = _add_sink(sinks, query, own, top, weight, sums, SINKS)
            _store_result(target, mixed, weight_and_sink, whole[:, None] & within[None, :])
        split = own & (first_part < last_part)
        if tl.max(split.to(tl.int32)) > 0:
            heads = tl.num_programs(0) * GROUP
            place = node * heads + query
            step = nodes * heads
            shown = split[:, None] & within[None, :]
            _store_partial(tops, totals, partials, part * step + place, dims, top, weight, sums, split, shown, D)
            one = tl.full([BLOCK_M], 1, tl.int32)
            _count_and_merge(
                target, tops, totals, partials, counters, sinks, query, split, place, step, first_part, last_part, one,
                one * 0, within, D, BLOCK_M, BLOCK_D, UNROLL, SINKS,
            )  # fmt: skip


@triton.jit
def _end_block(
    all_top, all_weight, all_sums, top, total, sums, tops, totals, partials, reached, final, part, mine, merged, goal,
    dims, SHARED: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """After a block that reaches the end of its part: merge the part for `merged` rows, and store it for the others.

    A part ends where the next one begins, or at the last key (`final`). Unless SHARED, all rows are `merged`.
    """
    ended = mine & (tl.minimum(final, _part_start(part + 1)) + mine.to(tl.int32) * 0 <= reached)
    weight = tl.max(total, 1)  # the columns are equal
    new_top, new_weight, new_sums = _merge(all_top, all_weight, all_sums, top, weight, sums)
    joined = ended & merged
    if SHARED:
        apart = ended & (merged == 0)
        shown = apart[:, None] & (dims < D)[None, :]
        _store_partial(tops, totals, partials, goal, dims, top, weight, sums, apart, shown, D)
    return (
        tl.where(joined, new_top, all_top),
        tl.where(joined, new_weight, all_weight),
        tl.where(joined[:, None], new_sums, all_sums),
    )


@triton.jit
def _attend_tile(
    queries, keys, values, table, lineage, out, tops, totals, partials, counters, sinks, scale, inner,
    length, node, query, own, reach, oldest, first_part, last_part, stop_part, begin_part, end_part, share, first_row,
    last, places, turns, nodes, query_row, query_head, key_row, value_row, lineage_row, out_row, out_head,
    SHARED: tl.constexpr, FUSED: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Parts begin_part to end_part - 1 of a tile, whose rows are of one request.

    One loop over all blocks, so that the loads of later parts are under way while one is computed. The softmax starts
    anew with each part. At the end of a part it is merged with those before it, if this is the first share of the
    tile's parts. Otherwise it is stored. SHARED: other programs have parts of the same rows. FUSED: the blocks in which
    paths differ follow in one turn for each path.
    """
    dims = tl.arange(0, BLOCK_D)
    within = dims < D
    asked = queries + node[:, None].to(tl.int64) * query_row + query[:, None] * query_head + dims[None, :]
    q = tl.load(asked, mask=own[:, None] & within[None, :], other=0.0)
    target = out + node[:, None].to(tl.int64) * out_row + query[:, None] * out_head + dims[None, :]
    heads = tl.num_programs(0) * GROUP
    place = node * heads + query
    step = nodes * heads
    begin = tl.maximum(_part_start(begin_part), tl.min(tl.where(own, oldest, 1 << 30)) // BLOCK_N * BLOCK_N)
    final = tl.max(tl.where(own, reach, 0))
    end = tl.minimum(_part_start(end_part), final)
    if FUSED:
        end = tl.minimum(final, tl.maximum(length // BLOCK_N * BLOCK_N, begin))
    merged = own & (first_part < tl.where(share == 0, end_part, -1))  # rows whose first part is here
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, ONES], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    all_top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # of the merged parts
    all_weight = tl.zeros([BLOCK_M], tl.float32)
    all_sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for at in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        part, top, total, sums = _begin_block(at, top, total, sums)
        mine = own & (first_part <= part) & (part <= stop_part)
        slot = _committed_slots(at, end, table, PAGED, PAGE, BLOCK_N)
        top, total, sums = _block_step(
            q, keys, values, slot, at, end, mine, reach, oldest, scale, inner, top, total, sums, key_row, value_row, D,
            BLOCK_N, BLOCK_D, CAPPED, PRECISION,
        )  # fmt: skip
        all_top, all_weight, all_sums = _end_block(
            all_top, all_weight, all_sums, top, total, sums, tops, totals, partials, at + BLOCK_N, final, part, mine,
            merged, part * step + place, dims, SHARED, D,
        )  # fmt: skip
    if FUSED:
        for at in tl.range(end, final, BLOCK_N, num_stages=1):
            part, top, total, sums = _begin_block(at, top, total, sums)
            mine = own & (first_part <= part) & (part <= last_part)
            for turn in tl.range(0, turns, num_stages=STAGES):
                path_end = (places >> (4 * turn) & 15).to(tl.int32)
                active = mine & (last == path_end)  # other rows do not change in this turn
                reached = tl.max(tl.where(active, reach, 0))
                line = lineage + (first_row + path_end) * lineage_row
                slot = _path_slots(at, reached, line, length, table, PAGED, PAGE, BLOCK_N)
                top, total, sums = _block_step(
                    q, keys, values, slot, at, reached, active, reach, oldest, scale, inner, top, total, sums, key_row,
                    value_row, D, BLOCK_N, BLOCK_D, CAPPED, PRECISION,
                )  # fmt: skip
            all_top, all_weight, all_sums = _end_block(
                all_top, all_weight, all_sums, top, total, sums, tops, totals, partials, at + BLOCK_N, final, part,
                mine, merged, part * step + place, dims, SHARED, D,
            )  # fmt: skip
    newest = tl.minimum(stop_part, end_part - 1)  # part of each row here
    made = tl.where(own, newest - tl.maximum(first_part, begin_part) + 1, 0)
    whole = own & merged & (newest == last_part)
    weight_and_sink, mixed = _add_sink(sinks, query, own, all_top, all_weight, all_sums, SINKS)
    _store_result(target, mixed, weight_and_sink, whole[:, None] & within[None, :])
    if SHARED:
        counted = own & (whole == 0) & (made > 0)
        if tl.max(counted.to(tl.int32)) > 0:
            kept = counted & merged
            shown = kept[:, None] & within[None, :]
            goal = newest * step + place
            _store_partial(tops, totals, partials, goal, dims, all_top, all_weight, all_sums, kept, shown, D)
            _count_and_merge(
                target, tops, totals, partials, counters, sinks, query, counted, place, step, first_part, last_part,
                made, tl.where(kept, made - 1, 0), within, D, BLOCK_M, BLOCK_D, UNROLL, SINKS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["nodes", "lineage_row", "window", "first", "tiles", "stride", "singles", "table_row"])
def _attend_paths(
    queries, keys, values, owners, lengths, tables, tile_rows, reach_at, lineage, out, tops, totals, partials, counters,
    sinks, scale, inner, window, first, nodes, tiles, stride, singles,
    table_row, query_row, query_head, key_head, key_row, value_head, value_row, lineage_row, out_row, out_head,
    SINGLE_ROWS: tl.constexpr, PAGED: tl.constexpr, TILED: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
    PRECISION: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, CHUNKED: tl.constexpr, SHARED: tl.constexpr,
    FUSED: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (key head, tile of rows), for the GROUP queries of the head.

    The first `singles` programs compute the parts in which paths differ, each for SINGLE_ROWS rows, one path after the
    other (0: the rows are a chain, or FUSED). In the other parts all rows of a request find their keys in the same
    slots: a program computes one of `stride` shares of adjacent parts for a tile. FUSED: it computes all parts of it.
    """
    CHAIN: tl.constexpr = SINGLE_ROWS == 0
    head = tl.program_id(0)
    each = tl.program_id(1)  # those that may have no work start last
    single = each < singles
    shared = each - singles
    tile = tl.maximum(shared, 0) % tiles
    rows = tl.where(single, SINGLE_ROWS, BLOCK_M // GROUP)
    first_row = tl.where(single, each, tile) * rows
    if TILED:  # a tile has rows of one request
        begin = tl.load(tile_rows + tile, mask=shared >= 0, other=0)
        rows = tl.where(single, SINGLE_ROWS, tl.load(tile_rows + tile + 1, mask=shared >= 0, other=0) - begin)
        first_row = tl.where(single, first_row, begin)

    member = tl.arange(0, BLOCK_M)
    node = first_row + member // GROUP
    query = head * GROUP + member % GROUP
    live = (member // GROUP < rows) & (node < nodes)
    reach = tl.load(reach_at + node, mask=live, other=0).to(tl.int32)
    oldest = reach - window  # the first position that a row sees
    if CHUNKED:
        oldest = tl.maximum(reach - 1, 0) // window * window
    oldest = tl.maximum(oldest, first)
    first_part = tl.where(reach > 0, _part_of(oldest), 0)
    last_part = tl.where(reach > 0, _part_of(reach - 1), 0)  # a row without keys stores zeros
    if PAGED:
        owner = tl.load(owners + node, mask=live, other=0)
        committed = tl.load(lengths + owner, mask=live, other=0).to(tl.int32)
        length = tl.max(committed)
    else:
        length = tl.load(lengths).to(tl.int32)
        committed = tl.full([BLOCK_M], 0, tl.int32) + length
    start_part, stop_part = first_part, last_part  # of this program's rows
    if not CHAIN:
        branching = _part_of(committed)
        start_part = tl.where(single, tl.maximum(first_part, branching), first_part)
        stop_part = tl.where(single, last_part, tl.minimum(last_part, branching - 1))
    own = live & (start_part <= stop_part)
    end = tl.max(tl.where(own, stop_part, -1)) + 1
    begin = tl.minimum(tl.min(tl.where(own, start_part, 1 << 30)), end)
    share = tl.where(single, 0, shared // tiles)
    count = tl.where(single, end - begin, (end - begin + stride - 1) // stride)
    part = begin + share * count
    end = tl.minimum(part + count, end)
    keys += head.to(tl.int64) * key_head
    values += head.to(tl.int64) * value_head
    if part < end:  # the others make room at once, without a wait
        table = tables
        if PAGED:
            _, table = _request_of(first_row, owners, lengths, tables, table_row)
        if PDL:
            near, far = _limits(part, own & (reach > 0), reach, oldest, BLOCK_N)
            far = tl.minimum(far, length)
            for at in range(near, far, BLOCK_N):
                column = _committed_slots(at, far, table, PAGED, PAGE, BLOCK_N).to(tl.int64)
                if not PAGED:
                    column = tl.minimum(column, length - 1)
                for line in tl.static_range(0, D, LINE):
                    prefetch(keys + column * key_row + line)
                    prefetch(values + column * value_row + line)
        last = node
        places, turns = length.to(tl.int64) * 0, length * 0
        if not CHAIN or FUSED:
            in_turns = live
            if not FUSED:
                in_turns = live & (tl.where(single, member, BLOCK_M) < BLOCK_M)
            last, places, turns = _turns(
                lineage, lineage_row, node, first_row, tl.minimum(rows, nodes - first_row), reach - committed,
                in_turns, BLOCK_M // GROUP,
            )  # fmt: skip
        pdl_wait(PDL)
        if not single:
            _attend_tile(
                queries, keys, values, table, lineage, out, tops, totals, partials, counters, sinks, scale, inner,
                length, node, query, own, reach, oldest, first_part, last_part, stop_part, part, end, share, first_row,
                last, places, turns, nodes,
                query_row, query_head, key_row, value_row, lineage_row, out_row, out_head, SHARED, FUSED, PAGED, PAGE,
                GROUP, D, BLOCK_M, BLOCK_N, BLOCK_D, UNROLL, STAGES, PRECISION, CAPPED, SINKS,
            )  # fmt: skip
        if not CHAIN:
            for now in tl.range(part, tl.where(single, end, part), num_stages=1):
                _attend_rows(
                    queries, keys, values, owners, lengths, tables, lineage, out, tops, totals, partials, counters,
                    sinks, scale, inner, length, node, query, own & (start_part <= now) & (now <= stop_part), reach,
                    oldest, first_part, last_part, first_row, last, places, turns, nodes, now,
                    table_row, query_row, query_head, key_row, value_row, lineage_row, out_row, out_head,
                    PAGED, PAGE, GROUP, D, BLOCK_M, BLOCK_N, BLOCK_D, UNROLL, PRECISION, CAPPED, SINKS,
                )  # fmt: skip


def choose_tile(rows: int, group: int, width: int, dtype: torch.dtype, chain: bool, several: bool) -> Tile:
    """The tile for a pass. Its height, warps and stages change no result; its keys depend on the model alone.

    chain: each row follows the one before. several: rows are of several requests.
    """
    height, stages = max(power_of_two(group), 16), STAGES
    if dtype == torch.float32:
        return Tile(height, 32, 4, stages) if width <= 64 else Tile(height, 16, 8, stages)
    block_d = max(power_of_two(width), 16)
    tall = min(64, MAX_TILE // block_d)  # pays in passes over many rows of a chain
    if chain and not several and rows * group >= 4 * tall:
        height, stages = max(tall, height), CHAIN_STAGES
    keys = 64 if block_d <= MAX_WIDTH else 32
    return Tile(height, keys, 8 if width > 128 else 4, stages)


def batch_bytes(group: int, width: int, dtype: torch.dtype) -> int:
    """Bytes of shared memory that a program for several requests needs at most, as Triton compiles it."""
    tile = choose_tile(1, group, width, dtype, chain=False, several=True)
    rows = 4 * tile.keys + (2 if dtype == torch.float32 else 3) * tile.height  # of keys and values, and of queries
    return rows * max(power_of_two(width), 16) * dtype.itemsize + 1024


def parts_of(capacity: int) -> int:
    """The number of parts of this number of keys."""
    parts, start = 0, 0
    for end, size in ((NEAR_END.value, NEAR), (MIDDLE_END.value, MIDDLE), (capacity, FAR)):
        parts += -(-max(min(end, capacity) - start, 0) // size.value)
        start = end
    return parts


def _register_limit(x: Tensor, sums: int, programs: int) -> dict[str, int]:
    """Limit the registers of small tiles, so that a multiprocessor runs several programs at a time.

    `programs` of several requests, about; 0: there is one request.
    """
    if not x.is_cuda or torch.version.hip is not None:
        return {}
    if programs and sums <= BATCH_SMALL_TILE:
        return {"maxnreg": FEWER_REGISTERS if programs > MANY_PROGRAMS else REGISTERS}
    return {"maxnreg": REGISTERS} if sums <= SMALL_TILE else {}


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    reach: Tensor,
    lineage: Tensor | None,
    scale: float,
    out: Tensor,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    pages: Pages | None = None,
    first: int = 0,
    chunked: bool = False,
) -> None:
    """`path_attention` into `out`."""
    (count, heads, width), shared = queries.shape, keys.shape[0]
    assert queries.stride(2) == keys.stride(2) == values.stride(2) == out.stride(2) == 1
    assert reach.is_contiguous() and (lineage is None or lineage.stride(1) == 1)
    group, block_d = heads // shared, max(power_of_two(width), 16)
    several = pages is not None and pages.tiles is not None
    tile = choose_tile(count, group, width, queries.dtype, lineage is None, several)
    positions = keys.shape[1] if pages is None else pages.positions
    limit = MAX_PROGRAMS_SMALL if tile.height * block_d <= SMALL_TILE else MAX_PROGRAMS
    requests = 1 if pages is None else len(pages.lengths)
    parts, tiles = parts_of(positions), -(-count // (tile.height // group))
    if pages is not None and pages.tiles is not None:
        assert tile.height // group == tile_rows(group)
        tiles, limit = len(pages.tiles) - 1, BATCH_TILE_PROGRAMS if lineage is None else BATCH_TREE_PROGRAMS
    stride = max(1, min(parts, limit // (tiles * shared)))
    fused = FUSED_ROWS and several and stride == 1 and lineage is not None
    single_rows = 0
    if lineage is not None and not fused:
        single_rows = power_of_two(-(-count * shared // (BATCH_ROW_PROGRAMS if several else limit)))
        single_rows = min(single_rows, tile.height // group)
    singles = -(-count // single_rows) if single_rows else 0
    stored = parts if stride > 1 or singles else 1  # otherwise a program has all parts of its rows
    tops = torch.empty((2, stored, count * heads), device=out.device)
    partials = torch.empty((stored, count * heads, width), device=out.device)
    counts = counters(out.device) if count * heads <= COUNTERS else None
    if counts is None:
        counts = torch.zeros(count * heads, dtype=torch.int32, device=out.device)
    _attend_paths[(shared, singles + tiles * stride)](
        queries,
        keys,
        values,
        reach if pages is None else pages.owners,
        length if pages is None else pages.lengths,
        reach if pages is None else pages.tables,
        reach if pages is None or pages.tiles is None else pages.tiles,
        reach,
        reach if lineage is None else lineage,
        out,
        tops[0],
        tops[1],
        partials,
        counts,
        out if sinks is None else sinks,
        (scale if cap is None else cap) * LOG2_E,  # softmax in powers of two
        0.0 if cap is None else scale / cap,
        positions if window is None else window,
        first,
        count,
        tiles,
        stride,
        singles,
        0 if pages is None else pages.tables.stride(0),
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        0 if lineage is None else lineage.stride(0),
        *out.stride()[:2],
        SINGLE_ROWS=single_rows,
        PAGED=pages is not None,
        TILED=several,
        PAGE=PAGE_TOKENS,
        GROUP=group,
        D=width,
        BLOCK_M=tile.height,
        BLOCK_N=tile.keys,
        BLOCK_D=block_d,
        UNROLL=max(1, (BATCH_MERGED if several else MERGED) // (tile.height * block_d)),
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        CAPPED=cap is not None,
        SINKS=sinks is not None,
        CHUNKED=chunked and window is not None,
        SHARED=stride > 1 or singles > 0,
        FUSED=fused,
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=2,
        enable_fp_fusion=False,
        **_register_limit(out, tile.height * block_d, 0 if pages is None or not several else requests * shared),
        **pdl_launch(out),
    )
