"""The trees of several requests: three small kernels choose the rows of a verify pass, one accepts, one appends.

To choose, one program per request sorts the nodes of its tree. Then a single program finds the lowest key of all
requests that is chosen. It first looks only at the nodes of rank 1, 2, 4, 8, … of each tree, which bound the number of
nodes above any key within a factor of two, and so needs to see at most twice as many nodes as there are rows. The rows
of a request are the first nodes in its sorted order. Finally, one program per request writes them.

Keys are compared as unsigned orders, see `grow.unsigned`, in which 0 is below every key.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, pdl_trigger, power_of_two
from windfall.kernels.batch_rows import Appended, BatchRows, Described, Outcome, Sampled
from windfall.kernels.pages import PAGE_TOKENS, UNUSED_PAGE
from windfall.kernels.trees import TreeArrays
from windfall.kernels.triton.accept import _reset_to_root
from windfall.kernels.triton.counters import counters
from windfall.kernels.triton.grow import unsigned
from windfall.kernels.triton.pdl import pdl_wait

ROOT = tl.constexpr(2**32 - 1)  # the order of a root: above every key
FAR = tl.constexpr(2**31 - 1)  # above every row
TILE = 2048  # entries of `lineage` per iteration
PADDING = 512  # rows of padding per iteration
MIN_BLOCK, MIN_ENTRIES = 16, 256  # smaller sizes share one compiled kernel


@triton.jit
def _orders(key, count, floor, place, CAPACITY: tl.constexpr):
    """The orders of the nodes at these places of a tree; 0 for those that cannot be chosen."""
    known = (place < count) & (place < CAPACITY)
    keys = tl.load(key + place, mask=known, other=float("-inf"))
    order = unsigned(keys, known & (keys > float("-inf")) & (keys >= floor))
    return tl.where(place == 0, ROOT, order)


@triton.jit
def _sort_nodes(
    key,
    counts,
    live_at,
    limits,
    floor_at,
    lists,
    CAPACITY: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (request): write the orders of its best nodes, highest first, then 0."""
    pdl_wait(PDL)
    request = tl.program_id(0)
    place = tl.arange(0, BLOCK_C)
    kept = tl.zeros([BLOCK_C], tl.int32)
    if request < tl.load(live_at):
        order = _orders(key + request * CAPACITY, tl.load(counts + request), tl.load(floor_at), place, CAPACITY)
        order = tl.sort(order, descending=True)
        kept = tl.where(place < tl.load(limits + request), order, 0).to(tl.int32, bitcast=True)
    tl.store(lists + request * LONGEST + place, kept, mask=place < LONGEST)


@triton.jit
def _highest(order, weight, want):
    """A limit such that the orders from it on have a total weight of at least `want`, and those above it less.

    It is 0 if all positive orders weigh less. The orders above it may also weigh exactly `want`.
    """
    found = tl.sum(tl.where(order > 0, weight, 0), 0)
    many = (found >= want).to(tl.uint32)
    last = many & 0
    bit = many << 31
    while bit > 0:
        higher = last | bit
        found = tl.sum(tl.where(order >= higher, weight, 0), 0)
        last = tl.where(found >= want, higher, last)
        bit = (bit >> 1) * (found != want).to(tl.uint32)
    return last


@triton.jit(do_not_specialize=["all_rows", "all_requests"])
def _share_rows(
    lists,
    bases,
    tile_firsts,
    starts,
    all_rows,
    all_requests,
    TILE_ROWS: tl.constexpr,
    LONGEST: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the first row and the first attention tile of each request."""
    pdl_wait(PDL)
    request = tl.arange(0, BLOCK_R)
    inside = request < all_requests
    level = tl.arange(0, BLOCK_L)
    power = 1 << level
    at = lists + request[:, None] * LONGEST + power[None, :] - 1
    known = inside[:, None] & (level < LEVELS)[None, :]
    sketch = tl.load(at, mask=known, other=0).to(tl.uint32, bitcast=True)
    more = tl.broadcast_to((tl.maximum(power >> 1, 1))[None, :], (BLOCK_R, BLOCK_L))  # nodes that a level adds
    low = _highest(tl.reshape(sketch, (BLOCK_R * BLOCK_L,)), tl.reshape(more, (BLOCK_R * BLOCK_L,)), all_rows)

    # All nodes above `low` are among the first `size` of their requests, less than two for each row in all.
    size = 2 * tl.sum(tl.where(sketch > low, more, 0), 1) - 1
    size = tl.minimum(tl.maximum(size, 0), LONGEST)
    offset = tl.cumsum(size, 0) - size
    tl.store(bases + request, request * LONGEST - offset, mask=inside)
    entry = tl.arange(0, BLOCK_E)
    owner = tl.cumsum(tl.histogram(offset, BLOCK_E), 0) - 1
    real = entry < tl.sum(size, 0)
    tl.debug_barrier()
    base = tl.load(bases + owner, mask=real, other=0)
    order = tl.load(lists + base + entry, mask=real, other=0).to(tl.uint32, bitcast=True)
    order = tl.where(order > low, order, 0)
    last = _highest(order, tl.full([BLOCK_E], 1, tl.int32), all_rows)
    last = tl.where(last > low, last, low)

    above = tl.zeros([BLOCK_R], tl.int32)  # nodes above `last`
    level_too = tl.zeros([BLOCK_R], tl.int32)  # with those at `last`
    own = lists + request * LONGEST - 1
    step = tl.full([], LONGEST, tl.int32)
    while step > 0:
        further = above + step
        found = tl.load(own + further, mask=inside & (further <= LONGEST), other=0).to(tl.uint32, bitcast=True)
        above = tl.where(found > last, further, above)
        further = level_too + step
        found = tl.load(own + further, mask=inside & (further <= LONGEST), other=0).to(tl.uint32, bitcast=True)
        level_too = tl.where((found >= last) & (found > 0), further, level_too)
        step = step >> 1
    ties = level_too - above
    spare = all_rows - tl.sum(above, 0) - (tl.cumsum(ties, 0) - ties)  # for the ties of each request
    rows = above + tl.minimum(tl.maximum(spare, 0), ties)
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    tl.store(starts + request, (tl.cumsum(rows, 0) - rows).to(tl.int64), mask=inside)
    tl.store(starts + all_requests, tl.sum(rows, 0).to(tl.int64))
    tl.store(tile_firsts + request, tl.cumsum(tiles, 0) - tiles, mask=inside)
    tl.store(tile_firsts + all_requests, tl.sum(tiles, 0))


@triton.jit(do_not_specialize=["all_rows", "all_requests", "all_tiles", "lineage_row"])
def _write_rows(
    all_keys,
    all_tokens,
    all_parents,
    all_depth,
    ancestors,
    counts,
    floor_at,
    lengths,
    lists,
    tile_firsts,
    row_of,
    starts,
    tokens,
    owners,
    nodes,
    parents,
    depth,
    positions,
    slots,
    reach,
    lineage,
    tile_rows,
    staging,
    lineage_row,
    all_rows,
    all_requests,
    all_tiles,
    TILE_ROWS: tl.constexpr,
    CAPACITY: tl.constexpr,
    LONGEST: tl.constexpr,
    ANCESTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (request): write its rows and attention tiles. The last program writes those of the padding."""
    pdl_wait(PDL)
    request = tl.program_id(0)
    first = tl.load(starts + request).to(tl.int32)
    first_tile = tl.load(tile_firsts + request)
    if request == all_requests:
        zero = tl.zeros([BLOCK_P], tl.int64)
        for start in range(0, all_rows - first, BLOCK_P):
            mine = start + tl.arange(0, BLOCK_P)
            row = first + mine
            inside = row < all_rows
            tl.store(tokens + row, zero, mask=inside)
            tl.store(owners + row, zero.to(tl.int32), mask=inside)
            tl.store(nodes + row, zero - 1, mask=inside)
            tl.store(parents + row, row.to(tl.int64), mask=inside)
            tl.store(depth + row, zero, mask=inside)
            tl.store(positions + row, zero, mask=inside)
            tl.store(slots + row, zero + staging + row, mask=inside)
            tl.store(reach + row, zero, mask=inside)
            tl.store(tile_rows + first_tile + mine // TILE_ROWS, row, mask=inside & (mine % TILE_ROWS == 0))
        used = first_tile + (all_rows - first + TILE_ROWS - 1) // TILE_ROWS
        for start in range(used, all_tiles, BLOCK_P):
            tile = start + tl.arange(0, BLOCK_P)
            tl.store(tile_rows + tile, tl.full([BLOCK_P], all_rows, tl.int32), mask=tile < all_tiles)
    else:
        count = tl.load(starts + request + 1).to(tl.int32) - first
        if count > 0:
            place = tl.arange(0, BLOCK_C)
            key = all_keys + request * CAPACITY
            order = _orders(key, tl.load(counts + request), tl.load(floor_at), place, CAPACITY)
            last = tl.load(lists + request * LONGEST + count - 1).to(tl.uint32, bitcast=True)
            above = order > last
            level = order == last
            spare = count - tl.sum(above.to(tl.int32), 0)
            running = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), 0)  # both prefix sums at once
            ties = running >> 16
            chosen = above | (level & (ties <= spare))
            here = first + (running & 0xFFFF) + tl.minimum(ties, spare) - 1
            row_of += request * CAPACITY
            tl.store(row_of + place, here, mask=chosen)
            tl.store(nodes + here, place.to(tl.int64), mask=chosen)
            length = tl.load(lengths + request)
            tl.debug_barrier()

            all_tokens += request * CAPACITY
            all_parents += request * CAPACITY
            all_depth += request * CAPACITY
            ancestors += request * CAPACITY * ANCESTORS
            column = tl.arange(0, BLOCK_D)
            for start in range(0, count, BLOCK_I):
                mine = start + tl.arange(0, BLOCK_I)
                real = mine < count
                row = first + mine
                node = tl.load(nodes + row, mask=real, other=0).to(tl.int32)
                deep = tl.load(all_depth + node, mask=real, other=0)
                parent = tl.load(all_parents + node, mask=real, other=-1)
                parent_row = tl.load(row_of + parent, mask=parent >= 0, other=0)
                tl.store(tokens + row, tl.load(all_tokens + node, mask=real, other=0), mask=real)
                tl.store(owners + row, tl.full([BLOCK_I], 0, tl.int32) + request, mask=real)
                tl.store(parents + row, tl.where(parent >= 0, parent_row, row).to(tl.int64), mask=real)
                tl.store(depth + row, deep, mask=real)
                tl.store(positions + row, length + deep, mask=real)
                tl.store(slots + row, (staging + row).to(tl.int64), mask=real)
                tl.store(reach + row, length + deep + 1, mask=real)
                tl.store(tile_rows + first_tile + mine // TILE_ROWS, row, mask=real & (mine % TILE_ROWS == 0))
                inside = real[:, None] & (column < COLUMNS)[None, :]
                at = ancestors + node[:, None] * ANCESTORS + column[None, :]
                line = tl.load(at, mask=inside, other=-1).to(tl.int32)
                there = tl.load(row_of + line, mask=line >= 0, other=0)
                goal = lineage + row[:, None] * lineage_row + column[None, :]
                tl.store(goal, tl.where(line >= 0, staging + there, 0).to(tl.int32), mask=inside)


def choose_rows(
    trees: TreeArrays,
    live: Tensor,
    limits: Tensor,
    floor: Tensor,
    lengths: Tensor,
    staging: int,
    tile_rows: int,
    rows: BatchRows,
) -> None:
    (requests, capacity, ancestors), (size, columns) = trees.ancestors.shape, rows.lineage.shape
    given = (*trees, limits, lengths, *rows[:8], rows.starts, rows.tiles)
    assert all(x.is_contiguous() for x in given) and rows.lineage.stride(1) == 1 and columns <= ancestors
    longest = block = power_of_two(capacity)
    lists, row_of, notes = (
        torch.empty(shape, dtype=torch.int32, device=live.device)
        for shape in ((requests, longest), (requests, capacity), (2, requests + 1))
    )
    warps = 8 if block >= 1024 else 4
    _sort_nodes[(requests,)](
        trees.key,
        trees.count,
        live,
        limits,
        floor,
        lists,
        CAPACITY=capacity,
        LONGEST=longest,
        BLOCK_C=block,
        num_warps=warps,
        **pdl_trigger(live),
    )
    levels = longest.bit_length()
    _share_rows[(1,)](
        lists,
        notes[0],
        notes[1],
        rows.starts,
        all_rows=size,
        all_requests=requests,
        TILE_ROWS=tile_rows,
        LONGEST=longest,
        LEVELS=levels,
        BLOCK_R=max(power_of_two(requests), MIN_BLOCK),
        BLOCK_L=power_of_two(levels),
        BLOCK_E=max(power_of_two(2 * size), MIN_ENTRIES),
        num_warps=8 if max(size, requests) > 128 else 4,
        **pdl_launch(live),
    )
    across = power_of_two(columns)
    _write_rows[(requests + 1,)](
        trees.key,
        trees.tokens,
        trees.parents,
        trees.depth,
        trees.ancestors,
        trees.count,
        floor,
        lengths,
        lists,
        notes[1],
        row_of,
        rows.starts,
        *rows[:9],
        rows.tiles,
        staging,
        rows.lineage.stride(0),
        all_rows=size,
        all_requests=requests,
        TILE_ROWS=tile_rows,
        all_tiles=len(rows.tiles),
        CAPACITY=capacity,
        LONGEST=longest,
        ANCESTORS=ancestors,
        COLUMNS=columns,
        BLOCK_C=block,
        BLOCK_I=min(longest, max(TILE // across, 1)),
        BLOCK_D=across,
        BLOCK_P=PADDING,
        num_warps=4,
        **pdl_launch(live),
    )


@triton.jit(do_not_specialize=["all_rows"])
def _describe_rows(
    all_rank,
    all_logq,
    all_score,
    owners,
    nodes,
    rank,
    logq,
    score,
    all_rows,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of rows)."""
    pdl_wait(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < all_rows
    node = tl.maximum(tl.load(nodes + row, mask=inside, other=0), 0)
    at = tl.load(owners + row, mask=inside, other=0) * CAPACITY + node
    tl.store(rank + row, tl.load(all_rank + at, mask=inside, other=0), mask=inside)
    tl.store(logq + row, tl.load(all_logq + at, mask=inside, other=0.0), mask=inside)
    tl.store(score + row, tl.load(all_score + at, mask=inside, other=0.0), mask=inside)


def describe_rows(trees: TreeArrays, rows: BatchRows, described: Described) -> None:
    size = len(rows.nodes)
    given = (trees.rank, trees.logq, trees.score, rows.owners, rows.nodes, *described)
    assert all(x.is_contiguous() for x in given)
    _describe_rows[(-(-size // MIN_ENTRIES),)](
        *given, size, CAPACITY=trees.key.shape[1], BLOCK=MIN_ENTRIES, num_warps=2, **pdl_launch(trees.key)
    )


@triton.jit
def _sample_trees(
    counts,
    all_parents,
    all_depth,
    all_rank,
    all_taken,
    all_logq,
    all_key,
    live_at,
    turn_at,
    count,
    parents,
    depth,
    rank,
    taken,
    logq,
    key,
    finished,
    SAMPLED: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (sampled request). The last one to finish moves the turn on."""
    pdl_wait(PDL)
    place = tl.program_id(0)
    turn = tl.load(turn_at)
    request = (turn + place) % tl.load(live_at)
    size = tl.load(counts + request)
    tl.store(count + place, size)
    for start in range(0, CAPACITY, BLOCK):
        node = start + tl.arange(0, BLOCK)
        inside = node < CAPACITY
        real = inside & (node < size)
        old = request * CAPACITY + node
        new = place * CAPACITY + node
        tl.store(parents + new, tl.load(all_parents + old, mask=real, other=0).to(tl.int16), mask=inside)
        tl.store(depth + new, tl.load(all_depth + old, mask=real, other=0).to(tl.int16), mask=inside)
        tl.store(rank + new, tl.load(all_rank + old, mask=real, other=0).to(tl.int16), mask=inside)
        tl.store(taken + new, tl.load(all_taken + old, mask=real, other=0), mask=inside)
        tl.store(logq + new, tl.load(all_logq + old, mask=real, other=0.0), mask=inside)
        tl.store(key + new, tl.load(all_key + old, mask=real, other=float("-inf")), mask=inside)
    tl.debug_barrier()  # every thread has read the turn
    before = tl.atomic_add(finished, 1, sem="acq_rel", scope="gpu")
    if before == SAMPLED - 1:
        tl.store(turn_at, turn + SAMPLED)
        tl.store(finished, 0)


def sample_trees(trees: TreeArrays, live: Tensor, turn: Tensor, sampled: Sampled) -> None:
    capacity, size = trees.key.shape[1], len(sampled.count)
    assert all(x.is_contiguous() for x in (*trees, *sampled))
    counts = counters(turn.device)
    finished = torch.zeros(1, dtype=torch.int32, device=turn.device) if counts is None else counts
    _sample_trees[(size,)](
        trees.count,
        trees.parents,
        trees.depth,
        trees.rank,
        trees.taken.view(torch.uint8),
        trees.logq,
        trees.key,
        live,
        turn,
        sampled.count,
        sampled.parents,
        sampled.depth,
        sampled.rank,
        sampled.taken.view(torch.uint8),
        sampled.logq,
        sampled.key,
        finished,
        SAMPLED=size,
        CAPACITY=capacity,
        BLOCK=min(power_of_two(capacity), 1024),
        num_warps=4,
        **pdl_launch(turn),
    )


@triton.jit(do_not_specialize=["all_requests", "all_tiles", "table_row", "last_page"])
def _root_rows(
    all_tokens,
    live_at,
    lengths,
    tables,
    tokens,
    owners,
    nodes,
    parents,
    depth,
    positions,
    slots,
    reach,
    starts,
    tile_rows,
    table_row,
    last_page,
    all_requests,
    all_tiles,
    CAPACITY: tl.constexpr,
    PAGE: tl.constexpr,
    UNUSED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of rows)."""
    pdl_wait(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < all_requests
    live = tl.load(live_at)
    real = inside & (row < live)
    zero = tl.zeros([BLOCK], tl.int64)
    length = tl.load(lengths + row, mask=real, other=0)
    at = tables + row * table_row + tl.minimum(length // PAGE, last_page)
    page = tl.load(at, mask=real, other=UNUSED).to(tl.int64)
    tl.store(tokens + row, tl.load(all_tokens + row * CAPACITY, mask=real, other=0), mask=inside)
    tl.store(owners + row, tl.where(real, row, 0), mask=inside)
    tl.store(nodes + row, tl.where(real, zero, zero - 1), mask=inside)
    tl.store(parents + row, row.to(tl.int64), mask=inside)
    tl.store(depth + row, zero, mask=inside)
    tl.store(positions + row, length, mask=inside)
    tl.store(slots + row, page * PAGE + length % PAGE, mask=inside)
    tl.store(reach + row, tl.where(real, length + 1, 0), mask=inside)
    tl.store(starts + row, tl.minimum(row.to(tl.int64), live), mask=row <= all_requests)
    tl.store(tile_rows + row, tl.minimum(row, all_requests), mask=row < all_tiles)


def root_rows(trees: TreeArrays, live: Tensor, lengths: Tensor, tables: Tensor, rows: BatchRows) -> None:
    requests = len(rows.tokens)
    assert tables.stride(1) == 1 and all(x.is_contiguous() for x in (trees.tokens, lengths, *rows[:8], *rows[9:]))
    _root_rows[(-(-max(requests + 1, len(rows.tiles)) // MIN_ENTRIES),)](
        trees.tokens,
        live,
        lengths,
        tables,
        *rows[:8],
        rows.starts,
        rows.tiles,
        tables.stride(0),
        tables.shape[1] - 1,
        all_requests=requests,
        all_tiles=len(rows.tiles),
        CAPACITY=trees.tokens.shape[1],
        PAGE=PAGE_TOKENS,
        UNUSED=UNUSED_PAGE,
        BLOCK=MIN_ENTRIES,
        num_warps=2,
        **pdl_trigger(live),
    )


@triton.jit(do_not_specialize=["table_row", "last_page"])
def _accept_rows(
    draws,
    row_tokens,
    row_parents,
    row_slots,
    starts,
    live_at,
    lengths,
    tables,
    accepted,
    new_tokens,
    path,
    source,
    goal,
    tokens,
    parents,
    depth,
    rank,
    logq,
    score,
    key,
    chance,
    taken,
    ancestors,
    slot,
    counts,
    expanded,
    staged,
    table_row,
    last_page,
    STEPS: tl.constexpr,
    STAGED_ROWS: tl.constexpr,
    STAGED: tl.constexpr,
    CAPACITY: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (request)."""
    pdl_wait(PDL)
    request = tl.program_id(0)
    live = (request < tl.load(live_at)).to(tl.int32)
    first = tl.load(starts + request).to(tl.int32)
    end = tl.load(starts + request + 1).to(tl.int32)
    length = tl.load(lengths + request)
    row = first + tl.arange(0, BLOCK)
    inside = (row < end) & (row > first)  # without the root
    parent = tl.load(row_parents + row, mask=inside, other=0).to(tl.int32)
    token = tl.load(row_tokens + row, mask=inside, other=-1)
    follows = inside & (token == tl.load(draws + parent, mask=inside, other=-2))  # its token was drawn after its parent
    parent = tl.where(follows, parent, -1)

    step = tl.arange(0, BLOCK_P)
    walked = tl.where((step == 0) & (live > 0), first, -1)
    count = live
    now = first
    going = live * (STEPS > 1)
    while going > 0:
        following = tl.min(tl.where(parent == now, row, FAR), 0)
        going = (following < FAR).to(tl.int32)
        walked = tl.where((step == count) & (going > 0), following, walked)
        now = following
        count += going
        going = going * (count < STEPS).to(tl.int32)

    kept = walked >= 0
    wanted = step < STEPS
    drawn = tl.load(draws + walked, mask=kept, other=0)
    begin = tl.load(row_slots + walked, mask=kept, other=0)
    position = length + step
    page = tl.load(tables + request * table_row + tl.minimum(position // PAGE, last_page), mask=kept, other=0)
    there = tl.where(kept, page.to(tl.int64) * PAGE + position % PAGE, 0)
    cell = request * STEPS + step
    tl.store(new_tokens + cell, drawn, mask=wanted)
    tl.store(path + cell, walked.to(tl.int64), mask=wanted)
    tl.store(source + cell, begin, mask=wanted)
    tl.store(goal + cell, there, mask=wanted)
    tl.store(accepted + request, count.to(tl.int64))
    tl.debug_barrier()  # every thread has read the length
    bonus = tl.sum(tl.where(step == count - 1, drawn, 0), 0)
    tl.store(lengths + request, length + count)
    at = request * CAPACITY
    _reset_to_root(
        tokens + at,
        parents + at,
        depth + at,
        rank + at,
        logq + at,
        score + at,
        key + at,
        chance + at,
        taken + at,
        ancestors + at * COLUMNS,
        slot + at,
        bonus,
        COLUMNS,
        BLOCK_D,
    )
    tl.store(counts + request, length * 0 + 1)
    for start in range(0, STAGED_ROWS, BLOCK_S):
        other = start + tl.arange(0, BLOCK_S)
        nothing = tl.full([BLOCK_S], -1, tl.int64)
        tl.store(expanded + request * STAGED_ROWS + other, nothing, mask=other < STAGED_ROWS)
    if STAGED:
        tl.store(staged + request, length * 0)


def accept_rows(
    draws: Tensor,
    rows: BatchRows,
    live: Tensor,
    lengths: Tensor,
    tables: Tensor,
    outcome: Outcome,
    trees: TreeArrays,
    expanded: Tensor | None,
    staged: Tensor | None,
) -> None:
    (requests, capacity, columns), steps = trees.ancestors.shape, outcome.tokens.shape[1]
    given = (draws, *rows[:8], rows.starts, lengths, *outcome, *trees, expanded, staged)
    assert tables.stride(1) == 1 and all(x.is_contiguous() for x in given if x is not None)
    staged_rows = 0 if expanded is None else expanded.shape[1]
    _accept_rows[(requests,)](
        draws,
        rows.tokens,
        rows.parents,
        rows.slots,
        rows.starts,
        live,
        lengths,
        tables,
        *outcome,
        *trees[:8],
        trees.taken.view(torch.uint8),
        trees.ancestors,
        trees.slot,
        trees.count,
        *(live if x is None else x for x in (expanded, staged)),
        tables.stride(0),
        tables.shape[1] - 1,
        STEPS=steps,
        STAGED_ROWS=staged_rows,
        STAGED=staged is not None,
        CAPACITY=capacity,
        COLUMNS=columns,
        PAGE=PAGE_TOKENS,
        BLOCK=max(power_of_two(len(draws)), MIN_ENTRIES),
        BLOCK_P=power_of_two(steps),
        BLOCK_S=min(power_of_two(staged_rows), 512),
        BLOCK_D=power_of_two(columns),
        num_warps=4,
        **pdl_launch(draws),
    )


@triton.jit(do_not_specialize=["table_row", "last_page", "rows"])
def _append_to_pages(
    lengths,
    counts,
    tables,
    positions,
    slots,
    reach,
    last,
    table_row,
    last_page,
    rows,
    PAGE: tl.constexpr,
    UNUSED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (request)."""
    pdl_wait(PDL)
    request = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    inside = row < rows
    length = tl.load(lengths + request)
    count = tl.load(counts + request)
    real = inside & (row < count)
    position = length + row
    at = tl.minimum(position // PAGE, last_page)
    page = tl.load(tables + request * table_row + at, mask=real, other=UNUSED).to(tl.int64)
    cell = request * rows + row
    tl.store(positions + cell, position, mask=inside)
    tl.store(slots + cell, page * PAGE + position % PAGE, mask=inside)
    tl.store(reach + cell, tl.where(real, position + 1, 0), mask=inside)
    tl.store(last + request, request * rows + tl.maximum(count - 1, 0))
    tl.debug_barrier()  # every thread has read the length
    tl.store(lengths + request, length + count)


def append_to_pages(lengths: Tensor, counts: Tensor, tables: Tensor, rows: int) -> Appended:
    requests = len(lengths)
    assert lengths.is_contiguous() and counts.is_contiguous() and tables.stride(1) == 1
    positions, slots, reach = (lengths.new_empty(requests * rows) for _ in range(3))
    last, block = torch.empty_like(lengths), max(power_of_two(rows), MIN_BLOCK)
    _append_to_pages[(requests,)](
        lengths,
        counts,
        tables,
        positions,
        slots,
        reach,
        last,
        tables.stride(0),
        tables.shape[1] - 1,
        rows=rows,
        PAGE=PAGE_TOKENS,
        UNUSED=UNUSED_PAGE,
        BLOCK=block,
        num_warps=max(1, min(4, block // 128)),
        **pdl_trigger(lengths),
    )
    return Appended(positions, slots, reach, last)
