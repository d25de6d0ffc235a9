"""One program appends the children, finds the best nodes by repeated maximum, and writes the rows of the next pass.

A batch has one such program for each request; all arrays of a request are contiguous.

Reductions are of 32-bit integers, which a warp does in one instruction. A barrier separates stores of one thread from
loads of another. The previous kernel computes the children's tokens and log-probabilities. Everything that does not
depend on them, including the choice of the best older nodes, is done before waiting for that kernel.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.rules import Rule
from windfall.kernels.trees import Calibration, NextPass, TreeArrays
from windfall.kernels.triton.pdl import pdl_wait

NONE = tl.constexpr(-(2**31))  # below the order of every float
FAR = tl.constexpr(2**31 - 1)
COLUMNS = 16  # of `ancestors`, copied per iteration
TILE = 4096  # mask entries per iteration


@triton.jit
def order_of(values):
    """Orders: 32-bit integers that sort like these floats."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The floats of these orders."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _acceptance(logq, slope, by_depth, by_rank):
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
def _load_ancestors(ancestors, parent, start, MAX_DEPTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of `ancestors` from `start` on, for these nodes → [BLOCK_W, COLUMNS]."""
    level = start + tl.arange(0, COLUMNS)
    return tl.load(
        ancestors + parent[:, None] * (MAX_DEPTH + 1) + level[None, :], mask=(level <= MAX_DEPTH)[None, :], other=-1
    )


@triton.jit
def _store_ancestors(
    ancestors,
    above,
    place,
    below,
    fits,
    start,
    MAX_DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store the same columns for the children. A child is its own entry at its own depth."""
    level = start + tl.arange(0, COLUMNS)
    itself = level[None, None, :] == below[:, None, None]
    column = tl.where(itself, place[:, :, None].to(tl.int64), above[:, None, :])
    goal = ancestors + place[:, :, None] * (MAX_DEPTH + 1) + level[None, None, :]
    tl.store(goal, column, mask=fits[:, :, None] & (level <= MAX_DEPTH)[None, None, :])


@triton.jit
def best(order, place, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The places of the highest orders, best first, then -1; and these orders. The lower place wins ties."""
    lane = tl.arange(0, BLOCK)
    chosen = tl.full([BLOCK], -1, tl.int32)
    orders = tl.full([BLOCK], NONE, tl.int32)
    for i in range(COUNT):
        first = tl.max(order, 0)
        found = tl.min(tl.where(order == first, place, FAR), 0)
        chosen = tl.where((lane == i) & (first > NONE), found, chosen)
        orders = tl.where(lane == i, first, orders)
        order = tl.where(place == found, NONE, order)
    return chosen, orders


@triton.jit
def _best_older(
    key,
    taken,
    depth,
    count,
    price,
    CAPACITY: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    LANES: tl.constexpr,
):
    """The best older nodes that can still be expanded, their orders, and the number of older nodes worth a row."""
    place = tl.arange(0, BLOCK_C)
    known = (place < count) & (place < CAPACITY)
    every = tl.load(key + place, mask=known, other=float("-inf"))
    unexpanded = tl.load(taken + place, mask=known, other=1) == 0
    shallow = tl.load(depth + place, mask=known, other=MAX_DEPTH) < MAX_DEPTH
    order = tl.where(known & unexpanded & shallow & (every > float("-inf")), order_of(every), NONE)
    worth_a_row = tl.sum((known & (place > 0) & (tl.exp(every) > price)).to(tl.int32), 0)
    chosen, orders = best(order, place, WIDTH, LANES)
    return chosen, orders, worth_a_row


@triton.jit
def _forecast(keys, level, likely, forecast, CHILDREN: tl.constexpr, BLOCK: tl.constexpr, price):
    """Expected gain of the children of these nodes, minus the price of their rows."""
    child = tl.arange(0, BLOCK)
    bucket = (likely > 0.35).to(tl.int32) + (likely > 0.75).to(tl.int32)
    entry = (tl.minimum(level, 5) * 3 + bucket)[:, None] * CHILDREN + child[None, :]
    chances = tl.load(forecast + entry, mask=(child < CHILDREN)[None, :], other=0.0)
    worth = tl.where((child < CHILDREN)[None, :], tl.maximum(tl.exp(keys)[:, None] * chances - price, 0.0), 0.0)
    return tl.sum(tl.sum(worth, 1), 0)


@triton.jit
def _staged_nodes(expanded, depth, staged, start, STAGED_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The nodes of the staged rows from `start` on, -1 if there is none, and their depths."""
    other = start + tl.arange(0, BLOCK)
    nodes = tl.load(expanded + other, mask=other < tl.minimum(staged, STAGED_ROWS), other=-1).to(tl.int32)
    return nodes, tl.load(depth + tl.maximum(nodes, 0), mask=nodes >= 0, other=0).to(tl.int32)


@triton.jit
def unsigned(values, real):
    """Unsigned orders: positive integers that sort like these floats; 0 where `real` is false."""
    return tl.where(real, order_of(values).to(tl.uint32, bitcast=True) ^ 0x80000000, 0)


@triton.jit
def float_of(order):
    """The floats of these unsigned orders."""
    return value_of((order ^ 0x80000000).to(tl.int32, bitcast=True))


@triton.jit
def threshold(first, second, want):
    """The `want`-th highest of these unsigned orders, bit by bit; 0 if fewer than `want` are positive."""
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
def _stays(
    fresh,
    usable,
    old_order,
    count,
    deep,
    TOP: tl.constexpr,
    BUDGET: tl.constexpr,
    LOG_SHARE: tl.constexpr,
    FIRST_WIDTH: tl.constexpr,
    FIRST_LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Which new nodes stay in the tree, and the order of the last one that is good enough."""
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
        if deep <= FIRST_LEVELS:
            room = tl.minimum(room, FIRST_WIDTH)
        else:
            order = tl.where(fresh >= highest + LOG_SHARE, order, 0)
        last = threshold(order, nothing, room)
        stays = at_least(order, last, room - tl.sum((order > last).to(tl.int32), 0))
    return stays, last


@triton.jit
def _choose_among_top(
    key,
    taken,
    depth,
    next_nodes,
    count,
    start,
    last,
    WHOLE: tl.constexpr,
    TOP: tl.constexpr,
    INCLUDE_LAST: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Choose the nodes of the next pass among the best TOP, ascending; returns the sum of their probabilities."""
    place = tl.arange(0, BLOCK_C)
    known = place < count
    every = tl.load(key + place, mask=known, other=float("-inf"))
    used = tl.load(taken + place, mask=known, other=1).to(tl.int32)
    order = unsigned(every, known)
    eligible = known & (tl.load(depth + place, mask=known, other=MAX_DEPTH) < MAX_DEPTH) & (order >= last)
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
    if INCLUDE_LAST:
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
def _child_keys(
    child_logq,
    parents,  # node, score, key, depth of the children
    rank,
    calibration,  # slope, by_depth, by_rank
    shape,
    shape_row,
    floor,
    CALIBRATED: tl.constexpr,
    SHAPED: tl.constexpr,
    FLOORED: tl.constexpr,
    DECAY: tl.constexpr,
):
    """Scores, keys and acceptance probabilities of the children [BLOCK_W, BLOCK_K]; -inf, -inf and 0 for none."""
    node, parent_score, parent_key, child_depth = parents
    alive = (node >= 0)[:, None] & (child_logq > float("-inf"))
    if SHAPED:
        number = (0.0 - parent_key).to(tl.int32)
        child = tl.load(shape + number[:, None] * shape_row + rank[None, :], mask=alive, other=-1).to(tl.int32)
        alive = alive & (child >= 0)
    scores = tl.where(alive, parent_score[:, None] + child_logq, float("-inf"))
    if CALIBRATED:
        slope, by_depth, by_rank = calibration
        calibrated = tl.where(alive, _acceptance(tl.where(alive, child_logq, -1.0), slope, by_depth, by_rank), 0.0)
        calibrated = calibrated / tl.maximum(tl.sum(calibrated, 1), 1.0)[:, None]
        step = tl.log(tl.where(alive, calibrated, 1.0)).to(tl.float32)
        keys = tl.where(alive, parent_key[:, None] + step, float("-inf"))
        chances = calibrated.to(tl.float32)
    elif SHAPED:
        keys = tl.where(alive, 0.0 - child.to(tl.float32), float("-inf"))
        chances = tl.where(alive, tl.exp(child_logq), 0.0)
    else:
        keys = scores
        if DECAY != 0.0:
            keys = scores + DECAY * child_depth.to(tl.float32)[:, None]
        chances = tl.where(alive, tl.exp(child_logq), 0.0)
    if FLOORED:
        keys = tl.where(keys > tl.load(floor), keys, float("-inf"))
    return scores, keys, chances


@triton.jit
def _store_children(
    arrays,  # of the tree: tokens, parents, depth, rank, logq, score, key, chance, taken, ancestors
    values,  # of the children: tokens, logq, scores, keys, chances
    place,
    fits,
    of_parents,  # node, depth of the children, ancestors
    MAX_DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Store the children at these places of the tree."""
    tokens, parents, depth, rank, logq, score, key, chance, taken, ancestors = arrays
    child_tokens, child_logq, scores, keys, chances = values
    parent, child_depth, parent_ancestors = of_parents
    child_rank = tl.arange(0, BLOCK_K)
    deep = tl.broadcast_to(child_depth[:, None], (BLOCK_W, BLOCK_K))
    tl.store(tokens + place, child_tokens, mask=fits)
    tl.store(parents + place, tl.broadcast_to(parent[:, None], (BLOCK_W, BLOCK_K)).to(tl.int64), mask=fits)
    tl.store(depth + place, deep.to(tl.int64), mask=fits)
    tl.store(rank + place, tl.broadcast_to(child_rank[None, :], (BLOCK_W, BLOCK_K)).to(tl.int64), mask=fits)
    tl.store(logq + place, child_logq, mask=fits)
    tl.store(score + place, scores, mask=fits)
    tl.store(key + place, keys, mask=fits)
    tl.store(chance + place, chances, mask=fits)
    tl.store(taken + place, tl.zeros([BLOCK_W, BLOCK_K], tl.uint8), mask=fits)
    _store_ancestors(ancestors, parent_ancestors, place, child_depth, fits, 0, MAX_DEPTH, COLUMNS)
    for start in range(COLUMNS, MAX_DEPTH + 1, COLUMNS):
        further = _load_ancestors(ancestors, parent, start, MAX_DEPTH, COLUMNS)
        _store_ancestors(ancestors, further, place, child_depth, fits, start, MAX_DEPTH, COLUMNS)


@triton.jit
def _choose_selected(
    arrays,  # of the tree: key, taken, depth
    next_nodes,
    count,
    grown,
    last,
    level,
    WHOLE: tl.constexpr,
    TOP: tl.constexpr,
    INCLUDE_LAST: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The nodes of the next pass for selective rules, ascending, then -1; their keys; the probability of the best TOP.

    Without TOP these are all new nodes, which start at `count` and have depth `level`.
    """
    key, taken, depth = arrays
    lane = tl.arange(0, BLOCK_N)
    mass = 0.0
    if TOP > 0:
        mass = _choose_among_top(
            key,
            taken,
            depth,
            next_nodes,
            count + grown,
            count,
            last,
            WHOLE,
            TOP,
            INCLUDE_LAST,
            MAX_DEPTH,
            WIDTH,
            BLOCK_C,
            BLOCK_N,
        )
        tl.debug_barrier()
        chosen = tl.load(next_nodes + lane, mask=lane < WIDTH, other=-1).to(tl.int32)
    else:
        chosen = tl.where((lane < grown) & (level < MAX_DEPTH), count + lane, -1)
    keys = tl.load(key + tl.maximum(chosen, 0), mask=chosen >= 0, other=float("-inf"))
    return chosen, keys, mass


@triton.jit
def _choose_by_key(
    children,  # scores, keys, places, whether they fit, depth
    candidates,  # older nodes and their orders
    bounds,
    WHOLE: tl.constexpr,
    BOUNDED: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The nodes of the next pass by key, best first, then -1; and their keys. WHOLE: older nodes are candidates too."""
    scores, keys, place, fits, child_depth = children
    older, older_orders = candidates
    CELLS: tl.constexpr = BLOCK_W * BLOCK_K
    deep = tl.broadcast_to(child_depth[:, None], (BLOCK_W, BLOCK_K))
    eligible = fits & (deep < MAX_DEPTH) & (keys > float("-inf"))
    if BOUNDED:
        within = (scores >= tl.load(bounds)) & (
            (deep.to(tl.float32) < tl.load(bounds + 1)) | (scores > tl.load(bounds + 2))
        )
        eligible = eligible & within
    order = tl.reshape(tl.where(eligible, order_of(keys), NONE), (CELLS,))
    candidate = tl.reshape(place, (CELLS,))
    if WHOLE:
        order = tl.reshape(tl.join(order, older_orders), (2 * CELLS,))
        candidate = tl.reshape(tl.join(candidate, older), (2 * CELLS,))
    chosen, orders = best(order, candidate, WIDTH, BLOCK_N)
    return chosen, tl.where(chosen >= 0, value_of(orders), float("-inf"))


@triton.jit
def _store_next_pass(
    rows,  # nodes, tokens, positions, slots, parent_slots, own_slots
    arrays,  # of the tree: tokens, parents, taken, slot
    expanded,
    chosen,
    level,
    staged,
    length,
    base,
    WIDTH: tl.constexpr,
    STAGED_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the rows of the next pass, and stage them if all of them fit; `level` holds the depths of these nodes."""
    next_nodes, next_tokens, positions, slots, parent_slots, own_slots = rows
    tokens, parents, taken, slot = arrays
    lane = tl.arange(0, BLOCK_N)
    live = lane < WIDTH
    real = chosen >= 0
    node = tl.maximum(chosen, 0)
    parent = tl.load(parents + node, mask=real, other=0)
    fits = 0 * lane + staged + WIDTH <= STAGED_ROWS  # a vector, since masks are vectors
    tl.store(next_nodes + lane, chosen.to(tl.int64), mask=live)
    tl.store(next_tokens + lane, tl.load(tokens + node, mask=real, other=0), mask=live)
    tl.store(positions + lane, (length - 1 + level).to(tl.int64), mask=live)
    tl.store(slots + lane, (base + staged + lane).to(tl.int64), mask=live)
    tl.store(parent_slots + lane, tl.load(slot + parent, mask=real, other=0), mask=live)
    tl.store(own_slots + lane, (1 + staged + lane).to(tl.int64), mask=live)
    tl.store(taken + node, tl.full([BLOCK_N], 1, tl.uint8), mask=real)
    tl.store(slot + node, (1 + staged + lane).to(tl.int64), mask=real & fits)
    tl.store(expanded + staged + lane, chosen.to(tl.int64), mask=live & fits)


@triton.jit
def _store_mask(
    mask,
    mask_row,
    arrays,  # ancestors, depth, expanded
    chosen,
    staged,
    first,  # nodes and depths of the first BLOCK_S staged rows
    MAX_DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGED_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Write which staged rows each row of the next pass sees: its ancestors and itself."""
    ancestors, depth, expanded = arrays
    other_nodes, other_depths = first
    lane = tl.arange(0, BLOCK_N)
    real = chosen >= 0
    node = tl.maximum(chosen, 0)
    fits = 0 * lane + staged + WIDTH <= STAGED_ROWS
    for start in range(0, STAGED_ROWS, BLOCK_S):
        other = start + tl.arange(0, BLOCK_S)
        seen = (other[None, :] == staged + lane[:, None]) & (real & fits)[
            :, None
        ]  # itself; new rows see no other new row
        if start < staged:
            if start > 0:
                other_nodes, other_depths = _staged_nodes(expanded, depth, staged, start, STAGED_ROWS, BLOCK_S)
            asked = real[:, None] & (other_nodes >= 0)[None, :]
            at = ancestors + node[:, None] * (MAX_DEPTH + 1) + other_depths[None, :]
            found = tl.load(at, mask=asked, other=-2).to(tl.int32)
            seen = seen | (found == other_nodes[None, :])
        tl.store(
            mask + lane[:, None] * mask_row + other[None, :],
            seen.to(tl.uint8),
            mask=(lane < WIDTH)[:, None] & (other < STAGED_ROWS)[None, :],
        )


@triton.jit
def _store_lineage(
    lineage,
    arrays,  # ancestors, slot
    chosen,
    base,
    COLUMNS: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Write the KV rows of the ancestors of each row of the next pass, from depth 1 on; 0 where there is none."""
    ancestors, slot = arrays
    lane = tl.arange(0, BLOCK_N)
    real = chosen >= 0
    node = tl.maximum(chosen, 0)
    for start in range(0, COLUMNS, BLOCK_L):
        column = start + tl.arange(0, BLOCK_L)
        inside = (column < COLUMNS)[None, :]
        at = ancestors + node[:, None] * (MAX_DEPTH + 1) + 1 + column[None, :]
        above = tl.load(at, mask=real[:, None] & inside, other=-1)
        place = tl.load(slot + above, mask=above >= 0, other=0)
        line = tl.where(above >= 0, base + place - 1, 0)
        goal = lineage + lane[:, None] * COLUMNS + column[None, :]
        tl.store(goal, line.to(tl.int32), mask=(lane < WIDTH)[:, None] & inside)


@triton.jit
def _store_summary(
    summary,
    summary_row,
    chosen,  # of the next pass: keys, depths, chances
    forecast,
    prices,  # of a pass and of a row
    worth_a_row,
    nodes,
    mass,
    CALIBRATED: tl.constexpr,
    CHILDREN: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Write the summary of this pass, see policies.plan.Summary."""
    keys, level, chances = chosen
    pass_price, row_price = prices
    goal = summary + summary_row * 6
    highest = tl.max(keys, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp(keys - base), 0)
    gain = 0.0
    worth = 0.0
    if CALIBRATED:
        gain = _forecast(keys, level, chances, forecast, CHILDREN, BLOCK_O, row_price) - pass_price
        worth = worth_a_row.to(tl.float32)
    tl.store(goal, highest)
    tl.store(goal + 1, highest + tl.log(tl.maximum(total, 1.0)))  # the best node alone contributes 1
    tl.store(goal + 2, gain)
    tl.store(goal + 3, worth)
    tl.store(goal + 4, nodes)
    tl.store(goal + 5, mass)
    tl.store(summary, summary_row.to(tl.float32))


@triton.jit
def _grow(
    nodes,
    child_tokens,
    child_logq,
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
    parent_slots,
    own_slots,
    mask,
    expanded,
    staged_at,
    length_at,
    base_at,
    summary,
    lineage,
    mask_row,
    shape_row,
    mask_rows,  # between requests: entries of the mask, the summary and the calibration; 0 if all share them
    summary_rows,
    weights_row,
    forecast_row,
    prices_row,
    sources,  # [BLOCK_W] the row of each node's children in `child_tokens`, -1 if it has none; None: the rows in order
    WHOLE: tl.constexpr,
    CALIBRATED: tl.constexpr,
    SHAPED: tl.constexpr,
    BOUNDED: tl.constexpr,
    FLOORED: tl.constexpr,
    DECAY: tl.constexpr,
    TOP: tl.constexpr,
    INCLUDE_LAST: tl.constexpr,
    BUDGET: tl.constexpr,
    LOG_SHARE: tl.constexpr,
    FIRST_WIDTH: tl.constexpr,
    FIRST_LEVELS: tl.constexpr,
    CAPACITY: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
    PARENTS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGED_ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    LINEAGE: tl.constexpr,
    BATCH: tl.constexpr,
    CHILDREN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (request). Up to `pdl_wait` it only reads what earlier kernels than the previous one have written."""
    if BATCH:
        request = tl.program_id(0)
        nodes += request * PARENTS
        if sources is None:
            child_tokens += request * PARENTS * K
            child_logq += request * PARENTS * K
        tokens += request * CAPACITY
        parents += request * CAPACITY
        depth += request * CAPACITY
        rank += request * CAPACITY
        logq += request * CAPACITY
        score += request * CAPACITY
        key += request * CAPACITY
        chance += request * CAPACITY
        taken += request * CAPACITY
        ancestors += request * CAPACITY * (MAX_DEPTH + 1)
        slot += request * CAPACITY
        count_at += request
        weights += request * weights_row
        forecast += request * forecast_row
        prices += request * prices_row
        next_nodes += request * WIDTH
        next_tokens += request * WIDTH
        positions += request * WIDTH
        slots += request * WIDTH
        parent_slots += request * WIDTH
        own_slots += request * WIDTH
        mask += request * mask_rows
        expanded += request * STAGED_ROWS
        staged_at += request
        length_at += request
        base_at += request
        summary += request * summary_rows
        lineage += request * WIDTH * LINEAGE
    CELLS: tl.constexpr = BLOCK_W * BLOCK_K
    SELECTIVE: tl.constexpr = (TOP > 0) | (BUDGET > 0)
    row = tl.arange(0, BLOCK_W)
    column = tl.arange(0, BLOCK_K)
    count = tl.load(count_at).to(tl.int32)
    staged = tl.load(staged_at).to(tl.int32)
    length = tl.load(length_at).to(tl.int32)
    base = tl.load(base_at).to(tl.int32)
    node = tl.load(nodes + row, mask=row < PARENTS, other=-1).to(tl.int32)
    staged_nodes, staged_depths = _staged_nodes(expanded, depth, staged, 0, STAGED_ROWS, BLOCK_S)
    parent = tl.maximum(node, 0)
    child_depth = tl.load(depth + parent).to(tl.int32) + 1
    parent_score = tl.load(score + parent)
    parent_key = tl.load(key + parent)
    parent_ancestors = _load_ancestors(ancestors, parent, 0, MAX_DEPTH, COLUMNS)
    pass_price = 0.0
    row_price = 0.0
    slope = 0.0
    by_depth = child_depth
    by_rank = column
    if CALIBRATED:
        pass_price = tl.load(prices)
        row_price = tl.load(prices + 1)
        slope = tl.load(weights)
        by_depth = tl.load(weights + tl.minimum(child_depth, 6))
        by_rank = tl.load(weights + 7 + tl.minimum(column, 4))
    row_before = tl.load(summary).to(tl.int32)
    summary_row = tl.where(count == 1, 1, row_before + 1)
    nodes_before = tl.where(count == 1, 1.0, tl.load(summary + row_before * 6 + 4))
    old_order = tl.zeros([1], tl.uint32)
    if TOP > 0:
        every = tl.arange(0, BLOCK_C)
        old_order = unsigned(tl.load(key + every, mask=every < count, other=0.0), every < count)
    older = node
    older_orders = node
    worth_a_row = tl.full([], 0, tl.int32)
    if CALIBRATED and not WHOLE:
        worth_a_row = tl.where(count == 1, 0.0, tl.load(summary + row_before * 6 + 3)).to(tl.int32)
    if WHOLE and not SELECTIVE:
        older, older_orders, worth_a_row = _best_older(
            key, taken, depth, count, row_price, CAPACITY, MAX_DEPTH, WIDTH, BLOCK_C, CELLS
        )
    pdl_wait(PDL)

    inside = (row < PARENTS)[:, None] & (column < K)[None, :]
    cell = row[:, None] * K + column[None, :]
    source = cell
    given = inside
    if sources is not None:
        source = sources[:, None] * K + column[None, :]
        given = inside & (sources >= 0)[:, None]
    logqs = tl.load(child_logq + source, mask=given, other=float("-inf"))
    names = tl.load(child_tokens + source, mask=given, other=0)
    place = count + cell
    fits = inside & (place < CAPACITY)
    calibration = (slope, by_depth, by_rank)
    parent_values = (node, parent_score, parent_key, child_depth)
    scores, keys, chances = _child_keys(
        logqs, parent_values, column, calibration, shape, shape_row, floor, CALIBRATED, SHAPED, FLOORED, DECAY
    )
    grown = PARENTS * K
    if SELECTIVE:
        usable = tl.reshape(inside & (keys > float("-inf")), (CELLS,))
        level = tl.max(tl.where(node >= 0, child_depth, 0), 0)
        cells = tl.reshape(keys, (CELLS,))
        stays, last = _stays(
            cells, usable, old_order, count, level, TOP, BUDGET, LOG_SHARE, FIRST_WIDTH, FIRST_LEVELS, WIDTH
        )
        grown = tl.sum(stays.to(tl.int32), 0)
        place = tl.reshape(count + tl.cumsum(stays.to(tl.int32), 0) - 1, (BLOCK_W, BLOCK_K))
        fits = tl.reshape(stays, (BLOCK_W, BLOCK_K)) & (place < CAPACITY)
    arrays = (tokens, parents, depth, rank, logq, score, key, chance, taken, ancestors)
    values = (names, logqs, scores, keys, chances)
    of_parents = (parent, child_depth, parent_ancestors)
    _store_children(arrays, values, place, fits, of_parents, MAX_DEPTH, COLUMNS, BLOCK_W, BLOCK_K)
    tl.debug_barrier()

    mass = 0.0
    if SELECTIVE:
        chosen, chosen_keys, mass = _choose_selected(
            (key, taken, depth),
            next_nodes,
            count,
            grown,
            last,
            level,
            WHOLE,
            TOP,
            INCLUDE_LAST,
            MAX_DEPTH,
            WIDTH,
            BLOCK_C,
            BLOCK_N,
        )
        advance = tl.sum((chosen >= 0).to(tl.int32), 0)
    else:
        if WHOLE or CALIBRATED:
            worth_a_row += tl.sum(tl.sum((fits & (tl.exp(keys) > row_price)).to(tl.int32), 1), 0)
        children = (scores, keys, place, fits, child_depth)
        candidates = (older, older_orders)
        chosen, chosen_keys = _choose_by_key(
            children, candidates, bounds, WHOLE, BOUNDED, MAX_DEPTH, WIDTH, BLOCK_W, BLOCK_K, BLOCK_N
        )
        advance = WIDTH
    nodes_now = nodes_before + tl.sum(tl.sum((fits & (keys > float("-inf"))).to(tl.float32), 1), 0)

    chosen_depth = tl.load(depth + tl.maximum(chosen, 0), mask=chosen >= 0, other=0).to(tl.int32)
    chosen_chance = tl.load(chance + tl.maximum(chosen, 0), mask=chosen >= 0, other=0.0)
    rows = (next_nodes, next_tokens, positions, slots, parent_slots, own_slots)
    for_rows = (tokens, parents, taken, slot)
    _store_next_pass(rows, for_rows, expanded, chosen, chosen_depth, staged, length, base, WIDTH, STAGED_ROWS, BLOCK_N)
    if MASKED:
        first = (staged_nodes, staged_depths)
        for_mask = (ancestors, depth, expanded)
        _store_mask(mask, mask_row, for_mask, chosen, staged, first, MAX_DEPTH, WIDTH, STAGED_ROWS, BLOCK_N, BLOCK_S)
    if LINEAGE > 0:
        tl.debug_barrier()  # the slots of the chosen nodes are written
        _store_lineage(lineage, (ancestors, slot), chosen, base, LINEAGE, MAX_DEPTH, WIDTH, BLOCK_N, COLUMNS)
    next_rows = (chosen_keys, chosen_depth, chosen_chance)
    costs = (pass_price, row_price)
    _store_summary(
        summary, summary_row, next_rows, forecast, costs, worth_a_row, nodes_now, mass, CALIBRATED, CHILDREN, BLOCK_O
    )
    tl.store(count_at, (count + grown).to(tl.int64))
    tl.store(staged_at, (staged + tl.where(staged + WIDTH <= STAGED_ROWS, advance, 0)).to(tl.int64))


def grow(tree: TreeArrays, nodes: Tensor, *given: Any) -> None:
    """See `kernels.grow.reference`."""
    positional, fixed = arguments(tree, nodes, *given)
    _grow[(len(nodes) if nodes.dim() == 2 else 1,)](*positional, None, **fixed, **pdl_launch(nodes))


def arguments(
    tree: TreeArrays,
    nodes: Tensor,
    tokens: Tensor,
    logq: Tensor,
    next_pass: NextPass,
    rule: Rule,
    calibration: Calibration | None = None,
    shape: Tensor | None = None,
    bounds: Tensor | None = None,
    floor: Tensor | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the kernel up to `sources`, and what it is compiled for."""
    assert not (rule.calibrated and rule.selective)  # the kernel does not count worthy nodes for these
    whole = rule.whole
    batch, own = nodes.dim() == 2, calibration is not None and calibration.weights.dim() == 2
    given, k, (capacity, columns) = nodes.shape[-1], tokens.shape[-1], tree.ancestors.shape[-2:]
    width, staged_rows = next_pass.nodes.shape[-1], next_pass.expanded.shape[-1]
    mask, lineage = next_pass.mask, next_pass.lineage
    assert (mask is None or mask.stride(-1) == 1) and logq.dtype == torch.float32
    assert lineage is None or (lineage.is_contiguous() and lineage.shape[-1] < columns)
    assert shape is None or (shape.stride(1) == 1 and shape.shape[1] >= k)
    assert all(
        x.is_contiguous() for x in (*tree, nodes, tokens, logq, *next_pass[:6], *next_pass[7:12], *(calibration or ()))
    )
    weights, forecast, prices = calibration or (tree.key, tree.key.view(-1)[:1, None, None], tree.key)
    children = forecast.shape[-1]
    block_n, block_c = power_of_two(width), power_of_two(capacity)
    block_w, block_k = power_of_two(given), power_of_two(k)
    if whole and not rule.selective:  # the best older nodes need as many lanes as the children
        block_k = max(block_k, block_n // block_w)
    return [
        nodes,
        tokens,
        logq,
        *tree[:8],
        tree.taken.view(torch.uint8),
        tree.ancestors,
        tree.slot,
        tree.count,
        weights,
        forecast,
        prices,
        nodes if shape is None else shape,
        tree.key if bounds is None else bounds,
        tree.key if floor is None else floor,
        *next_pass[:6],
        nodes if mask is None else mask.view(torch.uint8),
        next_pass.expanded,
        next_pass.staged,
        next_pass.length,
        next_pass.base,
        next_pass.summary,
        nodes if lineage is None else lineage,
        0 if mask is None else mask.stride(-2),
        0 if shape is None else shape.stride(0),
        mask.stride(0) if batch and mask is not None else 0,
        next_pass.summary.stride(0) if batch else 0,
        *(x.stride(0) if own else 0 for x in (weights, forecast, prices)),
    ], {
        "WHOLE": whole,
        "CALIBRATED": calibration is not None,
        "SHAPED": shape is not None,
        "BOUNDED": bounds is not None,
        "FLOORED": floor is not None,
        "DECAY": rule.decay,
        "TOP": rule.top,
        "INCLUDE_LAST": rule.include_last,
        "BUDGET": rule.budget,
        "LOG_SHARE": rule.share,
        "FIRST_WIDTH": rule.first,
        "FIRST_LEVELS": rule.levels,
        "CAPACITY": capacity,
        "MAX_DEPTH": columns - 1,
        "PARENTS": given,
        "K": k,
        "WIDTH": width,
        "STAGED_ROWS": staged_rows,
        "MASKED": mask is not None,
        "LINEAGE": 0 if lineage is None else lineage.shape[-1],
        "BATCH": batch,
        "CHILDREN": children,
        "COLUMNS": min(COLUMNS, power_of_two(columns)),
        "BLOCK_W": block_w,
        "BLOCK_K": block_k,
        "BLOCK_N": block_n,
        "BLOCK_C": block_c,
        "BLOCK_S": min(power_of_two(staged_rows), max(TILE // block_n, 16)),
        "BLOCK_O": power_of_two(children),
        "num_warps": 8 if block_w * block_k > 256 or ((whole or rule.selective) and block_c >= 1024) else 4,
    }
