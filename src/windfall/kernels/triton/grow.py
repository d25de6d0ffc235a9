"""One program: children are appended, the best are found by one maximum after the other, and laid out as rows.

Reductions are of 32-bit integers, which a warp does in one instruction. What one thread stores and another reads has a
barrier between. The kernel ahead brings the children's names and values; all that can be known without them, down to
the best of the nodes that were there before, is done while that one still runs.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, power_of_two
from windfall.kernels.grow import Rule
from windfall.kernels.trees import Ahead, Terms, TreeArrays
from windfall.kernels.triton.chain import begin

NONE = tl.constexpr(-(2**31))  # below every float's order
FAR = tl.constexpr(2**31 - 1)
COLUMNS = 16  # of `line`, copied at a time
TILE = 4096  # cells of the mask made at a time


@triton.jit
def order_of(values):
    """32-bit integers that sort like these floats."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _believed(logq, slope, by_depth, by_rank):
    """Calibrator.accept in fp64."""
    wide = logq.to(tl.float64)
    odds = wide - tl.log(1.0 - tl.exp(tl.minimum(wide, -1e-6)))
    odds = tl.minimum(tl.maximum(odds, -5.0), 5.0)
    score = slope.to(tl.float64) * odds
    score += by_depth.to(tl.float64)[:, None]
    score += by_rank.to(tl.float64)[None, :]
    score = tl.minimum(tl.maximum(score, -30.0), 30.0)
    return 1.0 / (1.0 + tl.exp(-score))


@triton.jit
def _lines(line, parent, start, DEEPEST: tl.constexpr, COLUMNS: tl.constexpr):
    """These columns of `line` for these nodes, [BLOCK_W, COLUMNS]."""
    level = start + tl.arange(0, COLUMNS)
    return tl.load(line + parent[:, None] * (DEEPEST + 1) + level[None, :], mask=(level <= DEEPEST)[None, :], other=-1)


@triton.jit
def _descend(
    line,
    above,
    place,
    below,
    fits,
    start,
    DEEPEST: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The same columns for their children, who have themselves at their own depth."""
    level = start + tl.arange(0, COLUMNS)
    itself = level[None, None, :] == below[:, None, None]
    ancestors = tl.where(itself, place[:, :, None].to(tl.int64), above[:, None, :])
    goal = line + place[:, :, None] * (DEEPEST + 1) + level[None, None, :]
    tl.store(goal, ancestors, mask=fits[:, :, None] & (level <= DEEPEST)[None, None, :])


@triton.jit
def best(order, place, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The places of the highest orders, best first, ties to the lower, -1 behind them; and those orders."""
    lane = tl.arange(0, BLOCK)
    chosen = tl.full([BLOCK], -1, tl.int32)
    orders = tl.full([BLOCK], NONE, tl.int32)
    for turn in range(COUNT):
        first = tl.max(order, 0)
        found = tl.min(tl.where(order == first, place, FAR), 0)
        chosen = tl.where((lane == turn) & (first > NONE), found, chosen)
        orders = tl.where(lane == turn, first, orders)
        order = tl.where(place == found, NONE, order)
    return chosen, orders


@triton.jit
def _standing(
    key,
    taken,
    depth,
    count,
    price,
    CAPACITY: tl.constexpr,
    DEEPEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    LANES: tl.constexpr,
):
    """The best of the nodes so far that can still be expanded, their orders, and how many are worth a row."""
    place = tl.arange(0, BLOCK_C)
    known = (place < count) & (place < CAPACITY)
    every = tl.load(key + place, mask=known, other=float("-inf"))
    idle = tl.load(taken + place, mask=known, other=1) == 0
    shallow = tl.load(depth + place, mask=known, other=DEEPEST) < DEEPEST
    order = tl.where(known & idle & shallow & (every > float("-inf")), order_of(every), NONE)
    worthy = tl.sum((known & (place > 0) & (tl.exp(every) > price)).to(tl.int32), 0)
    chosen, orders = best(order, place, WIDTH, LANES)
    return chosen, orders, worthy


@triton.jit
def _forecast(keys, level, likely, forecast, CHILDREN: tl.constexpr, BLOCK: tl.constexpr, price):
    """What the children of these nodes should bring, less the price of their rows."""
    child = tl.arange(0, BLOCK)
    bucket = (likely > 0.35).to(tl.int32) + (likely > 0.75).to(tl.int32)
    entry = (tl.minimum(level, 5) * 3 + bucket)[:, None] * CHILDREN + child[None, :]
    hopes = tl.load(forecast + entry, mask=(child < CHILDREN)[None, :], other=0.0)
    worth = tl.where((child < CHILDREN)[None, :], tl.maximum(tl.exp(keys)[:, None] * hopes - price, 0.0), 0.0)
    return tl.sum(tl.sum(worth, 1), 0)


@triton.jit
def _staged(expanded, depth, staged, start, ROOM: tl.constexpr, BLOCK: tl.constexpr):
    """The nodes staged so far, -1 for none, and their depths."""
    other = start + tl.arange(0, BLOCK)
    who = tl.load(expanded + other, mask=other < tl.minimum(staged, ROOM), other=-1).to(tl.int32)
    return who, tl.load(depth + tl.maximum(who, 0), mask=who >= 0, other=0).to(tl.int32)


@triton.jit
def unsigned(values, real):
    """Unsigned integers above 0 that sort like these floats; 0 where they are not real."""
    return tl.where(real, order_of(values).to(tl.uint32, bitcast=True) ^ 0x80000000, 0)


@triton.jit
def float_of(order):
    """The float of an unsigned order."""
    return value_of((order ^ 0x80000000).to(tl.int32, bitcast=True))


@triton.jit
def threshold(first, second, want):
    """The `want`-th highest of these unsigned orders; 0 if there are fewer of them above 0."""
    found = tl.sum((first > 0).to(tl.int32), 0) + tl.sum((second > 0).to(tl.int32), 0)
    many = (found >= want).to(tl.uint32)
    last = many & 0
    bit = many << 31
    while bit > 0:
        higher = last | bit
        found = tl.sum((first >= higher).to(tl.int32), 0) + tl.sum((second >= higher).to(tl.int32), 0)
        last = tl.where(found >= want, higher, last)
        bit = bit >> 1
    return last


@triton.jit
def at_least(order, last, spare):
    """Which orders are above `last`, or among the first `spare` that are equal to it."""
    ties = (order == last) & (order > 0)
    return (order > last) | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= spare))


@triton.jit
def _kept(
    fresh,
    usable,
    old_order,
    count,
    deep,
    TOP: tl.constexpr,
    BUDGET: tl.constexpr,
    SHARE: tl.constexpr,
    FIRST: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Which of the newest nodes stay in the tree, and the order of the last of the best TOP nodes."""
    order = unsigned(fresh, usable)
    nothing = tl.zeros([1], tl.uint32)
    if TOP > 0:
        last = threshold(old_order, order, TOP)
        above = tl.sum((old_order > last).to(tl.int32), 0) + tl.sum((order > last).to(tl.int32), 0)
        ties = tl.sum(((old_order == last) & (old_order > 0)).to(tl.int32), 0)
        stays = at_least(order, last, TOP - above - ties)
    else:
        room = tl.minimum(BUDGET - count, WIDTH)
        highest = tl.max(tl.where(usable, fresh, float("-inf")), 0)
        if deep <= LEVELS:
            room = tl.minimum(room, FIRST)
        else:
            order = tl.where(fresh >= highest + SHARE, order, 0)
        last = threshold(order, nothing, room)
        stays = at_least(order, last, room - tl.sum((order > last).to(tl.int32), 0))
    return stays, last


@triton.jit
def _next_of_top(
    key,
    taken,
    depth,
    next_nodes,
    count,
    start,
    last,
    WHOLE: tl.constexpr,
    TOP: tl.constexpr,
    LAST: tl.constexpr,
    DEEPEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Choose the nodes of the next pass among the best TOP, ascending; the probability that these sum to."""
    place = tl.arange(0, BLOCK_C)
    known = place < count
    every = tl.load(key + place, mask=known, other=float("-inf"))
    used = tl.load(taken + place, mask=known, other=1).to(tl.int32)
    order = unsigned(every, known)
    eligible = known & (tl.load(depth + place, mask=known, other=DEEPEST) < DEEPEST) & (order >= last)
    if WHOLE:  # noqa: SIM108
        eligible = eligible & (used < 1)
    else:
        eligible = eligible & (place >= start)
    nothing = tl.zeros([1], tl.uint32)
    open_order = tl.where(eligible, order, 0)
    limit = threshold(open_order, nothing, WIDTH)
    chosen = at_least(open_order, limit, WIDTH - tl.sum((open_order > limit).to(tl.int32), 0))
    tl.store(taken + place, tl.full([BLOCK_C], 1, tl.uint8), mask=chosen)
    strict = (last > 0).to(tl.int32)
    if LAST:
        used = tl.maximum(used, chosen.to(tl.int32))
        expanded = tl.sum((known & (used > 0) & (order >= last)).to(tl.int32), 0)
        strict = strict * (expanded >= TOP).to(tl.int32)
    chosen = chosen & (((order > last).to(tl.int32) + 1 - strict) > 0)
    lane = tl.cumsum(chosen.to(tl.int32), 0) - 1
    many = tl.sum(chosen.to(tl.int32), 0)
    tl.store(next_nodes + lane, place.to(tl.int64), mask=chosen)
    one = tl.arange(0, BLOCK_N)
    tl.store(next_nodes + one, tl.full([BLOCK_N], -1, tl.int64), mask=(one >= many) & (one < WIDTH))
    above = tl.sum((order > last).to(tl.int32), 0)
    mass = tl.sum(tl.where(known & (order > last), tl.exp(every), 0.0), 0)
    return mass + tl.where(last > 0, (TOP - above).to(tl.float32) * tl.exp(float_of(last)), 0.0)


@triton.jit
def _grow(
    nodes,
    names,
    values,
    tokens,
    parents,
    depth,
    rank,
    logq,
    score,
    key,
    chance,
    taken,
    line,
    slot,
    count_at,
    weights,
    forecast,
    prices,
    shape,
    bounds,
    floor,
    next_nodes,
    next_tokens,
    positions,
    slots,
    above,
    here,
    mask,
    expanded,
    staged_at,
    length_at,
    summary,
    mask_row,
    shape_row,
    WHOLE: tl.constexpr,
    CALIBRATED: tl.constexpr,
    SHAPED: tl.constexpr,
    BOUNDED: tl.constexpr,
    FLOORED: tl.constexpr,
    DECAY: tl.constexpr,
    TOP: tl.constexpr,
    LAST: tl.constexpr,
    BUDGET: tl.constexpr,
    SHARE: tl.constexpr,
    FIRST: tl.constexpr,
    LEVELS: tl.constexpr,
    CAPACITY: tl.constexpr,
    DEEPEST: tl.constexpr,
    GIVEN: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ROOM: tl.constexpr,
    CHILDREN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_O: tl.constexpr,
    CHAINED: tl.constexpr,
):
    CELLS: tl.constexpr = BLOCK_W * BLOCK_K
    SELECTIVE: tl.constexpr = (TOP > 0) | (BUDGET > 0)
    row = tl.arange(0, BLOCK_W)
    column = tl.arange(0, BLOCK_K)
    count = tl.load(count_at).to(tl.int32)
    staged = tl.load(staged_at).to(tl.int32)
    length = tl.load(length_at).to(tl.int32)
    node = tl.load(nodes + row, mask=row < GIVEN, other=-1).to(tl.int32)
    who, at = _staged(expanded, depth, staged, 0, ROOM, BLOCK_S)
    parent = tl.maximum(node, 0)
    below = tl.load(depth + parent).to(tl.int32) + 1  # the children's depth
    base = tl.load(score + parent)
    parent_key = tl.load(key + parent)
    lines = _lines(line, parent, 0, DEEPEST, COLUMNS)
    fee = 0.0
    price = 0.0
    if CALIBRATED:
        fee = tl.load(prices)
        price = tl.load(prices + 1)
        slope = tl.load(weights)
        by_depth = tl.load(weights + tl.minimum(below, 6))
        by_rank = tl.load(weights + 7 + tl.minimum(column, 4))
    row_before = tl.load(summary).to(tl.int32)
    row_now = tl.where(count == 1, 1, row_before + 1)
    nodes_before = tl.where(count == 1, 1.0, tl.load(summary + row_before * 6 + 4))
    old_order = tl.zeros([1], tl.uint32)
    if TOP > 0:
        every = tl.arange(0, BLOCK_C)
        old_order = unsigned(tl.load(key + every, mask=every < count, other=0.0), every < count)
    if WHOLE and not SELECTIVE:
        old, old_orders, worthy = _standing(key, taken, depth, count, price, CAPACITY, DEEPEST, WIDTH, BLOCK_C, CELLS)
    begin(CHAINED)

    inside = (row < GIVEN)[:, None] & (column < K)[None, :]
    cell = row[:, None] * K + column[None, :]
    own = tl.load(values + cell, mask=inside, other=float("-inf"))
    name = tl.load(names + cell, mask=inside, other=0)
    place = count + cell
    fits = inside & (place < CAPACITY)
    alive = (node >= 0)[:, None] & (own > float("-inf"))
    if SHAPED:
        called = (0.0 - parent_key).to(tl.int32)
        child = tl.load(shape + called[:, None] * shape_row + column[None, :], mask=alive, other=-1).to(tl.int32)
        alive = alive & (child >= 0)
    total = tl.where(alive, base[:, None] + own, float("-inf"))
    if CALIBRATED:
        hope = tl.where(alive, _believed(tl.where(alive, own, -1.0), slope, by_depth, by_rank), 0.0)
        hope = hope / tl.maximum(tl.sum(hope, 1), 1.0)[:, None]
        step = tl.log(tl.where(alive, hope, 1.0)).to(tl.float32)
        fresh = tl.where(alive, parent_key[:, None] + step, float("-inf"))
        chances = hope.to(tl.float32)
    elif SHAPED:
        fresh = tl.where(alive, 0.0 - child.to(tl.float32), float("-inf"))
        chances = tl.where(alive, tl.exp(own), 0.0)
    else:
        fresh = total
        if DECAY != 0.0:
            fresh = total + DECAY * below.to(tl.float32)[:, None]
        chances = tl.where(alive, tl.exp(own), 0.0)
    if FLOORED:
        fresh = tl.where(fresh > tl.load(floor), fresh, float("-inf"))
    deep = tl.broadcast_to(below[:, None], (BLOCK_W, BLOCK_K))
    grown = GIVEN * K
    last = tl.full([], 0, tl.uint32)
    if SELECTIVE:
        usable = tl.reshape(inside & (fresh > float("-inf")), (CELLS,))
        level_now = tl.max(tl.where(node >= 0, below, 0), 0)
        cells = tl.reshape(fresh, (CELLS,))
        stays, last = _kept(cells, usable, old_order, count, level_now, TOP, BUDGET, SHARE, FIRST, LEVELS, WIDTH)
        grown = tl.sum(stays.to(tl.int32), 0)
        place = tl.reshape(count + tl.cumsum(stays.to(tl.int32), 0) - 1, (BLOCK_W, BLOCK_K))
        fits = tl.reshape(stays, (BLOCK_W, BLOCK_K)) & (place < CAPACITY)
    tl.store(tokens + place, name, mask=fits)
    tl.store(parents + place, tl.broadcast_to(parent[:, None], (BLOCK_W, BLOCK_K)).to(tl.int64), mask=fits)
    tl.store(depth + place, deep.to(tl.int64), mask=fits)
    tl.store(rank + place, tl.broadcast_to(column[None, :], (BLOCK_W, BLOCK_K)).to(tl.int64), mask=fits)
    tl.store(logq + place, own, mask=fits)
    tl.store(score + place, total, mask=fits)
    tl.store(key + place, fresh, mask=fits)
    tl.store(chance + place, chances, mask=fits)
    tl.store(taken + place, tl.zeros([BLOCK_W, BLOCK_K], tl.uint8), mask=fits)
    _descend(line, lines, place, below, fits, 0, DEEPEST, COLUMNS)
    for start in range(COLUMNS, DEEPEST + 1, COLUMNS):
        _descend(line, _lines(line, parent, start, DEEPEST, COLUMNS), place, below, fits, start, DEEPEST, COLUMNS)
    tl.debug_barrier()

    lane = tl.arange(0, BLOCK_N)
    live = lane < WIDTH
    mass = 0.0
    if SELECTIVE:
        if TOP > 0:
            mass = _next_of_top(
                key,
                taken,
                depth,
                next_nodes,
                count + grown,
                count,
                last,
                WHOLE,
                TOP,
                LAST,
                DEEPEST,
                WIDTH,
                BLOCK_C,
                BLOCK_N,
            )
            tl.debug_barrier()
            chosen = tl.load(next_nodes + lane, mask=live, other=-1).to(tl.int32)
        else:
            chosen = tl.where((lane < grown) & (level_now < DEEPEST), count + lane, -1)
        keys = tl.load(key + tl.maximum(chosen, 0), mask=chosen >= 0, other=float("-inf"))
        advance = tl.sum((chosen >= 0).to(tl.int32), 0)
    else:
        choosable = fits & (deep < DEEPEST) & (fresh > float("-inf"))
        if BOUNDED:
            likely = (total >= tl.load(bounds)) & (
                (deep.to(tl.float32) < tl.load(bounds + 1)) | (total > tl.load(bounds + 2))
            )
            choosable = choosable & likely
        order = tl.reshape(tl.where(choosable, order_of(fresh), NONE), (CELLS,))
        candidate = tl.reshape(place, (CELLS,))
        if WHOLE:
            worthy += tl.sum(tl.sum((fits & (tl.exp(fresh) > price)).to(tl.int32), 1), 0)
            order = tl.reshape(tl.join(order, old_orders), (2 * CELLS,))
            candidate = tl.reshape(tl.join(candidate, old), (2 * CELLS,))
        chosen, orders = best(order, candidate, WIDTH, BLOCK_N)
        keys = tl.where(chosen >= 0, value_of(orders), float("-inf"))
        advance = WIDTH
    nodes_now = nodes_before + tl.sum(tl.sum((fits & (fresh > float("-inf"))).to(tl.float32), 1), 0)
    count += grown

    real = chosen >= 0
    node = tl.maximum(chosen, 0)
    level = tl.load(depth + node, mask=real, other=0).to(tl.int32)
    likely = tl.load(chance + node, mask=real, other=0.0)
    parent = tl.load(parents + node, mask=real, other=0)
    fits = staged + WIDTH <= ROOM
    room = 0 * lane + staged + WIDTH <= ROOM  # the same as a vector, for masks
    tl.store(next_nodes + lane, chosen.to(tl.int64), mask=live)
    tl.store(next_tokens + lane, tl.load(tokens + node, mask=real, other=0), mask=live)
    tl.store(positions + lane, (length - 1 + level).to(tl.int64), mask=live)
    tl.store(slots + lane, (length + staged + lane).to(tl.int64), mask=live)
    tl.store(above + lane, tl.load(slot + parent, mask=real, other=0), mask=live)
    tl.store(here + lane, (1 + staged + lane).to(tl.int64), mask=live)
    tl.store(taken + node, tl.full([BLOCK_N], 1, tl.uint8), mask=real)
    tl.store(slot + node, (1 + staged + lane).to(tl.int64), mask=real & room)
    tl.store(expanded + staged + lane, chosen.to(tl.int64), mask=live & room)
    for start in range(0, ROOM, BLOCK_S):
        other = start + tl.arange(0, BLOCK_S)
        itself = (other[None, :] == staged + lane[:, None]) & (real & room)[:, None]  # no other of these is an ancestor
        seen = itself
        if start < staged:
            if start > 0:
                who, at = _staged(expanded, depth, staged, start, ROOM, BLOCK_S)
            asked = real[:, None] & (who >= 0)[None, :]
            found = tl.load(line + node[:, None] * (DEEPEST + 1) + at[None, :], mask=asked, other=-2).to(tl.int32)
            seen = seen | (found == who[None, :])
        tl.store(
            mask + lane[:, None] * mask_row + other[None, :],
            seen.to(tl.uint8),
            mask=live[:, None] & (other < ROOM)[None, :],
        )

    goal = summary + row_now * 6
    most = tl.max(keys, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(tl.exp(keys - base), 0)
    coming = 0.0
    worth = 0.0
    if CALIBRATED:
        coming = _forecast(keys, level, likely, forecast, CHILDREN, BLOCK_O, price) - fee
        worth = worthy.to(tl.float32)
    tl.store(goal, most)
    tl.store(goal + 1, most + tl.log(tl.maximum(total, 1.0)))  # 1 of it is the best's own
    tl.store(goal + 2, coming)
    tl.store(goal + 3, worth)
    tl.store(goal + 4, nodes_now)
    tl.store(goal + 5, mass)
    tl.store(summary, row_now.to(tl.float32))
    tl.store(count_at, count.to(tl.int64))
    tl.store(staged_at, (staged + tl.where(fits, advance, 0)).to(tl.int64))


def grow(
    tree: TreeArrays,
    nodes: Tensor,
    tokens: Tensor,
    logq: Tensor,
    ahead: Ahead,
    rule: Rule,
    terms: Terms | None = None,
    shape: Tensor | None = None,
    bounds: Tensor | None = None,
    floor: Tensor | None = None,
) -> None:
    """See `kernels.grow.reference`."""
    whole = rule.whole
    (given, k), width, (capacity, columns) = tokens.shape, len(ahead.nodes), tree.line.shape
    assert ahead.mask.stride(1) == 1 and logq.dtype == torch.float32
    assert shape is None or (shape.stride(1) == 1 and shape.shape[1] >= k)
    assert all(x.is_contiguous() for x in (*tree, nodes, tokens, logq, *ahead[:6], ahead.expanded, *(terms or ())))
    weights, forecast, prices = terms or (tree.key, tree.key[:1, None, None], tree.key)
    across, everyone = power_of_two(width), power_of_two(capacity)
    down, side = power_of_two(given), power_of_two(k)
    if (
        whole and not rule.selective
    ):  # the best of those that were there before need as many lanes as there are children
        side = max(side, across // down)
    _grow[(1,)](
        nodes,
        tokens,
        logq,
        *tree[:8],
        tree.taken.view(torch.uint8),
        tree.line,
        tree.slot,
        tree.count,
        weights,
        forecast,
        prices,
        nodes if shape is None else shape,
        tree.key if bounds is None else bounds,
        tree.key if floor is None else floor,
        *ahead[:6],
        ahead.mask.view(torch.uint8),
        ahead.expanded,
        ahead.staged,
        ahead.length,
        ahead.summary,
        ahead.mask.stride(0),
        0 if shape is None else shape.stride(0),
        WHOLE=whole,
        CALIBRATED=terms is not None,
        SHAPED=shape is not None,
        BOUNDED=bounds is not None,
        FLOORED=floor is not None,
        DECAY=rule.decay,
        TOP=rule.top,
        LAST=rule.include_last,
        BUDGET=rule.budget,
        SHARE=rule.share,
        FIRST=rule.first,
        LEVELS=rule.levels,
        CAPACITY=capacity,
        DEEPEST=columns - 1,
        GIVEN=given,
        K=k,
        WIDTH=width,
        ROOM=len(ahead.expanded),
        CHILDREN=forecast.shape[2],
        COLUMNS=min(COLUMNS, power_of_two(columns)),
        BLOCK_W=down,
        BLOCK_K=side,
        BLOCK_N=across,
        BLOCK_C=everyone,
        BLOCK_S=min(power_of_two(len(ahead.expanded)), max(TILE // across, 16)),
        BLOCK_O=power_of_two(forecast.shape[2]),
        num_warps=8 if down * side > 256 or ((whole or rule.selective) and everyone >= 1024) else 4,
        **follows(logq),
    )
