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
    promise,
    mask_row,
    shape_row,
    WHOLE: tl.constexpr,
    CALIBRATED: tl.constexpr,
    SHAPED: tl.constexpr,
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
    if WHOLE:
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
        chances = tl.where(alive, tl.exp(own), 0.0)
    deep = tl.broadcast_to(below[:, None], (BLOCK_W, BLOCK_K))
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

    choosable = fits & (deep < DEEPEST) & (fresh > float("-inf"))
    order = tl.reshape(tl.where(choosable, order_of(fresh), NONE), (CELLS,))
    candidate = tl.reshape(place, (CELLS,))
    if WHOLE:
        worthy += tl.sum(tl.sum((fits & (tl.exp(fresh) > price)).to(tl.int32), 1), 0)
        order = tl.reshape(tl.join(order, old_orders), (2 * CELLS,))
        candidate = tl.reshape(tl.join(candidate, old), (2 * CELLS,))
    chosen, orders = best(order, candidate, WIDTH, BLOCK_N)
    count += GIVEN * K

    lane = tl.arange(0, BLOCK_N)
    live = lane < WIDTH
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
        if start > 0:
            who, at = _staged(expanded, depth, staged, start, ROOM, BLOCK_S)
        asked = real[:, None] & (who >= 0)[None, :]
        found = tl.load(line + node[:, None] * (DEEPEST + 1) + at[None, :], mask=asked, other=-2).to(tl.int32)
        itself = (other[None, :] == staged + lane[:, None]) & (real & room)[:, None]  # no other of these is an ancestor
        seen = (found == who[None, :]) | itself
        tl.store(
            mask + lane[:, None] * mask_row + other[None, :],
            seen.to(tl.uint8),
            mask=live[:, None] & (other < ROOM)[None, :],
        )

    keys = tl.where(real, value_of(orders), float("-inf"))
    most = tl.max(keys, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    tl.store(promise, most)
    total = tl.sum(tl.exp(keys - base), 0)
    tl.store(promise + 1, most + tl.log(tl.maximum(total, 1.0)))  # 1 of it is the best's own
    if CALIBRATED:
        coming = _forecast(keys, level, likely, forecast, CHILDREN, BLOCK_O, price)
        tl.store(promise + 2, coming - fee)
        tl.store(promise + 3, worthy.to(tl.float32))
    else:
        tl.store(promise + 2, 0.0)
        tl.store(promise + 3, 0.0)
    tl.store(count_at, count.to(tl.int64))
    tl.store(staged_at, (staged + tl.where(fits, WIDTH, 0)).to(tl.int64))


def grow(
    tree: TreeArrays,
    nodes: Tensor,
    tokens: Tensor,
    logq: Tensor,
    ahead: Ahead,
    whole: bool,
    terms: Terms | None,
    shape: Tensor | None = None,
) -> None:
    """See `kernels.grow.reference`."""
    (given, k), width, (capacity, columns) = tokens.shape, len(ahead.nodes), tree.line.shape
    assert ahead.mask.stride(1) == 1 and logq.dtype == torch.float32
    assert shape is None or (shape.stride(1) == 1 and shape.shape[1] >= k)
    assert all(x.is_contiguous() for x in (*tree, nodes, tokens, logq, *ahead[:6], ahead.expanded, *(terms or ())))
    weights, forecast, prices = terms or (tree.key, tree.key[:1, None, None], tree.key)
    across, everyone = power_of_two(width), power_of_two(capacity)
    down, side = power_of_two(given), power_of_two(k)
    if whole:  # the best of those that were there before need as many lanes as there are children
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
        *ahead[:6],
        ahead.mask.view(torch.uint8),
        ahead.expanded,
        ahead.staged,
        ahead.length,
        ahead.promise,
        ahead.mask.stride(0),
        0 if shape is None else shape.stride(0),
        WHOLE=whole,
        CALIBRATED=terms is not None,
        SHAPED=shape is not None,
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
        num_warps=8 if down * side > 256 or (whole and everyone >= 1024) else 4,
        **follows(logq),
    )
