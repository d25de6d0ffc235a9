"""Attention of rows along their own paths: what a row gives depends on the keys of its path alone, to the bit.

A program has one row, and takes its keys in the order of their positions, in blocks and parts that begin at multiples
of their sizes. So neither the rows beside it, nor where in the cache its ancestors lie, nor the cache's size have a
part in any sum; the loops' bounds depend on the row's position, their bodies on nothing. Products and sums are not
fused but where the code says so, for no two compilations to fuse them differently.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import power_of_two
from windfall.kernels.triton.attention import COUNTERS, Tile, _absorb, _finish, _leave, _partial, counters

UNROLL = 4  # parts that are loaded together when they are combined


@triton.jit
def _combined(
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
    """The softmaxes of `needed` parts into one, in ascending order; those behind them change nothing: their share is
    exactly 0, that of what was before exactly 1. place [BLOCK_M]: of each row in the first part, `step` from the next.
    """
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
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
            higher = tl.maximum(top, levels[ahead])
            base = tl.where(higher == float("-inf"), 0.0, higher)  # rows that pad the group
            kept = tl.exp2(top - base)
            share = tl.exp2(levels[ahead] - base)
            whole = whole * kept + weights[ahead] * share
            sums = sums * kept[:, None] + parts[ahead] * share[:, None]
            top = higher
    return whole, sums


@triton.jit(do_not_specialize=["nodes", "lineage_row"])
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
    scale,
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
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (row, key head, part), for the GROUP queries of the head. Where a path has several parts, the last
    program to finish combines them, in ascending order."""
    node = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(length_at).to(tl.int32)
    reach = tl.load(reach_at + node).to(tl.int32)
    first = split * PART
    if (first >= reach) & (split > 0):  # the first part of a row that sees nothing gives its zeros
        return
    last = tl.minimum(first + PART, reach)

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
        used = position < last
        staged = tl.load(lineage + position - length, mask=used & (position >= length), other=0)
        column = tl.where(position < length, position, length + staged)
        k = tl.load(keys + column[None, :] * key_row + dims[:, None], mask=within[:, None] & used[None, :], other=0.0)
        v = tl.load(
            values + column[:, None] * value_row + dims[None, :], mask=used[:, None] & within[None, :], other=0.0
        )
        top, total, sums = _absorb(q, k, v, used[None, :], scale, top, total, sums, True, PRECISION)

    target = out + node.to(tl.int64) * out_row + query[:, None] * out_head + dims[None, :]
    if reach <= PART:
        _finish(target, sums, total, shown)
    else:
        heads = tl.num_programs(1)
        rows = nodes * GROUP
        place = head * rows + node * GROUP + member
        _leave(tops, totals, partials, split * heads * rows + place, dims, top, total, sums, live, shown, D)
        counter = counters + node * heads + head
        tl.debug_barrier()  # every thread's part is written before the one that counts releases it
        before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        needed = (reach + PART - 1) // PART
        if before == needed - 1:
            whole, mixed = _combined(
                tops, totals, partials, place, live, heads * rows, needed, D, BLOCK_M, BLOCK_D, UNROLL
            )
            _finish(target, mixed, whole, shown)
            tl.store(counter, 0)  # for the next launch


def tile(group: int, width: int, dtype: torch.dtype) -> Tile:
    """By the model alone."""
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
    part: int,
) -> None:
    """`path_attention` into `out`."""
    (count, heads, width), (shared, capacity, _) = queries.shape, keys.shape
    assert queries.stride(2) == keys.stride(2) == values.stride(2) == out.stride(2) == lineage.stride(1) == 1
    assert reach.is_contiguous()
    group = heads // shared
    shape = tile(group, width, queries.dtype)
    splits = -(-capacity // part)
    tops = torch.empty((2, splits, shared, count * group), device=out.device)
    partials = torch.empty((splits, shared, count * group, width), device=out.device)
    across = max(power_of_two(width), 16)
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
        scale * 1.4426950408889634,  # softmax in powers of two
        count,
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        lineage.stride(0),
        *out.stride()[:2],
        GROUP=group,
        D=width,
        PART=part,
        BLOCK_M=shape.rows,
        BLOCK_N=shape.keys,
        BLOCK_D=across,
        UNROLL=UNROLL,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=shape.warps,
        num_stages=shape.stages,
        enable_fp_fusion=False,
    )
