"""Attention of rows along their paths: a row's result depends only on the keys of its path, to the bit.

A program computes one row and processes its keys in the order of their positions, in blocks and parts whose limits
depend on positions alone. Therefore no sum depends on other rows, on the slots of the row's ancestors, or on the
capacity. Loop bounds depend only on the row's position. Multiply-adds are fused only where the code says so, since two
compilations could otherwise fuse them differently.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import power_of_two
from windfall.kernels.triton.attention import (
    Tile,
    _load_partial,
    _softmax_step,
    _store_partial,
    _store_result,
)
from windfall.kernels.triton.counters import COUNTERS, counters

UNROLL = 4  # parts loaded per iteration when parts are combined
NEAR_PART, FAR_PART = tl.constexpr(128), tl.constexpr(512)  # keys of a part: few, for many programs, ...
NEAR_PARTS = tl.constexpr(16)  # ... but more after this many parts, for few parts to combine


@triton.jit
def _part_start(part):
    """The first position of a part."""
    near = NEAR_PARTS * NEAR_PART
    return tl.where(part < NEAR_PARTS, part * NEAR_PART, near + (part - NEAR_PARTS) * FAR_PART)


@triton.jit
def _part_of(position):
    """The part that this position belongs to."""
    near = NEAR_PARTS * NEAR_PART
    return tl.where(position < near, position // NEAR_PART, NEAR_PARTS + (position - near) // FAR_PART)


@triton.jit
def _add_sink(sinks, query, live, top, total, sums, SINKS: tl.constexpr):
    """A key without a value, whose score is that of the query's head."""
    if SINKS:
        sink = tl.load(sinks + query, mask=live, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(top, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(top - base)
        total = total * kept + tl.exp2(sink - base)
        sums = sums * kept[:, None]
    return total, sums


@triton.jit
def _merge_parts(
    tops,
    totals,
    partials,
    place,
    live,
    step,
    needed,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Combine the softmaxes of `needed` parts in ascending order.

    Further parts would not change the result: their factor is exactly 0, and that of the sum so far exactly 1.
    place [BLOCK_M]: of each row in the first part; the next part is `step` further.
    """
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
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
            higher = tl.maximum(top, levels[ahead])
            base = tl.where(higher == float("-inf"), 0.0, higher)  # padding rows of the group
            kept = tl.exp2(top - base)
            share = tl.exp2(levels[ahead] - base)
            whole = whole * kept + weights[ahead] * share
            sums = sums * kept[:, None] + parts[ahead] * share[:, None]
            top = higher
    return top, whole, sums


@triton.jit(do_not_specialize=["nodes", "lineage_row", "window"])
def _attend_paths(
    queries,
    keys,
    values,
    length_at,
    reach_at,
    lineage,
    out,
    tops,
    totals,
    partials,
    counters,
    sinks,
    scale,
    inner,
    window,
    nodes,
    query_row,
    query_head,
    key_head,
    key_row,
    value_head,
    value_row,
    lineage_row,
    out_row,
    out_head,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    PRECISION: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Program (row, key head, part), for the GROUP queries of the head.

    If a path has several parts, the last program to finish combines them in ascending order.
    """
    node = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(length_at).to(tl.int32)
    reach = tl.load(reach_at + node).to(tl.int32)
    oldest = tl.maximum(reach - window, 0)  # the first position that the row sees
    oldest_part = _part_of(oldest)
    first = tl.maximum(_part_start(split), oldest // BLOCK_N * BLOCK_N)
    last = tl.minimum(_part_start(split + 1), reach)
    if (split < oldest_part) | ((first >= reach) & (split > 0)):  # the first part of a row without keys stores zeros
        return

    member = tl.arange(0, BLOCK_M)
    query = head * GROUP + member
    dims = tl.arange(0, BLOCK_D)
    live = member < GROUP
    within = dims < D
    shown = live[:, None] & within[None, :]
    asked = queries + node.to(tl.int64) * query_row + query[:, None] * query_head + dims[None, :]
    q = tl.load(asked, mask=shown, other=0.0)
    keys += head.to(tl.int64) * key_head
    values += head.to(tl.int64) * value_head
    lineage += node * lineage_row

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(first, last, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        used = (position < last) & (position >= oldest)
        staged = tl.load(lineage + position - length, mask=used & (position >= length), other=0)
        column = tl.where(position < length, position, length + staged)
        k = tl.load(keys + column[None, :] * key_row + dims[:, None], mask=within[:, None] & used[None, :], other=0.0)
        v = tl.load(
            values + column[:, None] * value_row + dims[None, :], mask=used[:, None] & within[None, :], other=0.0
        )
        top, total, sums = _softmax_step(
            q, k, v, used[None, :], scale, top, total, sums, True, PRECISION, inner, CAPPED
        )

    target = out + node.to(tl.int64) * out_row + query[:, None] * out_head + dims[None, :]
    needed = _part_of(reach - 1) - oldest_part + 1  # also 1 where nothing is seen
    if (needed <= 1) | (reach == 0):
        total, sums = _add_sink(sinks, query, live, top, total, sums, SINKS)
        _store_result(target, sums, total, shown)
    else:
        heads = tl.num_programs(1)
        rows = nodes * GROUP
        place = head * rows + node * GROUP + member
        _store_partial(tops, totals, partials, split * heads * rows + place, dims, top, total, sums, live, shown, D)
        counter = counters + node * heads + head
        tl.debug_barrier()  # all threads have stored their part before the atomic releases it
        before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        if before == needed - 1:
            first_place = oldest_part * heads * rows + place
            highest, whole, mixed = _merge_parts(
                tops, totals, partials, first_place, live, heads * rows, needed, D, BLOCK_M, BLOCK_D, UNROLL
            )
            whole, mixed = _add_sink(sinks, query, live, highest, whole, mixed, SINKS)
            _store_result(target, mixed, whole, shown)
            tl.store(counter, 0)  # for the next launch


def tile(group: int, width: int, dtype: torch.dtype) -> Tile:
    """The tile; it depends only on the model."""
    rows = max(power_of_two(group), 16)
    if dtype == torch.float32:
        return Tile(rows, 32, 4, 2) if width <= 64 else Tile(rows, 16, 8, 2)
    return Tile(rows, 64, 4, 2)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    reach: Tensor,
    lineage: Tensor,
    scale: float,
    out: Tensor,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """`path_attention` into `out`."""
    (count, heads, width), (shared, capacity, _) = queries.shape, keys.shape
    assert queries.stride(2) == keys.stride(2) == values.stride(2) == out.stride(2) == lineage.stride(1) == 1
    assert reach.is_contiguous()
    group = heads // shared
    shape = tile(group, width, queries.dtype)
    near = NEAR_PARTS.value * NEAR_PART.value
    splits = -(-min(capacity, near) // NEAR_PART.value) + -(-max(capacity - near, 0) // FAR_PART.value)
    tops = torch.empty((2, splits, shared, count * group), device=out.device)
    partials = torch.empty((splits, shared, count * group, width), device=out.device)
    block_d = max(power_of_two(width), 16)
    counts = counters(out.device) if count * shared <= COUNTERS else None
    if counts is None:
        counts = torch.zeros(count * shared, dtype=torch.int32, device=out.device)
    _attend_paths[(count, shared, splits)](
        queries,
        keys,
        values,
        length,
        reach,
        lineage,
        out,
        tops[0],
        tops[1],
        partials,
        counts,
        out if sinks is None else sinks,
        (scale if cap is None else cap) * 1.4426950408889634,  # softmax in powers of two
        0.0 if cap is None else scale / cap,
        capacity if window is None else window,
        count,
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        lineage.stride(0),
        *out.stride()[:2],
        GROUP=group,
        D=width,
        BLOCK_M=shape.rows,
        BLOCK_N=shape.keys,
        BLOCK_D=block_d,
        UNROLL=UNROLL,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        CAPPED=cap is not None,
        SINKS=sinks is not None,
        num_warps=shape.warps,
        num_stages=shape.stages,
        enable_fp_fusion=False,
    )


@triton.jit
def _lineage(mask, depth, positions, count, reach, lines, staged, mask_row, BLOCK: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < staged
    seen = tl.load(mask + row * mask_row + column, mask=inside, other=0) != 0
    level = tl.load(depth + column, mask=inside, other=0)
    tl.store(lines + row * staged + level, column, mask=inside & seen)
    own = tl.load(positions + row) + 1
    tl.store(reach + row, tl.where(row < tl.load(count), own, 0))


def lineage(mask: Tensor, depth: Tensor, positions: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """`kernels.attention.lineage`; depths at which a row has no ancestor are not written."""
    rows, staged = mask.shape
    assert mask.stride(1) == 1 and depth.is_contiguous() and positions.is_contiguous()
    reach = torch.empty_like(positions)
    lines = torch.empty(rows, staged, dtype=torch.int32, device=mask.device)
    block = power_of_two(staged)
    _lineage[(rows,)](
        mask.view(torch.uint8), depth, positions, count, reach, lines, staged, mask.stride(0), BLOCK=block, num_warps=1
    )
    return reach, lines
