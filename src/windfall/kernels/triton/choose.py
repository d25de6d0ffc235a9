"""One program finds the lowest key to keep bit by bit (radix select); a prefix sum gives each kept node its row."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_trigger, power_of_two
from windfall.kernels.trees import TreeArrays
from windfall.kernels.triton.grow import order_of
from windfall.kernels.triton.pdl import pdl_wait

TILE = 2048  # mask entries per iteration; four times as many for large masks


@triton.jit
def _choose(
    key,
    all_tokens,
    all_parents,
    all_depth,
    ancestors,
    count_at,
    limit_at,
    kept,
    tokens,
    parents,
    depth,
    mask,
    rows_at,
    mask_row,
    LIMITED: tl.constexpr,
    CAPACITY: tl.constexpr,
    DEEPEST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program."""
    pdl_wait(PDL)
    place = tl.arange(0, BLOCK_C)
    known = (place < tl.load(count_at)) & (place < CAPACITY)
    if LIMITED:
        known = known & (place < tl.load(limit_at))
    keys = tl.load(key + place, mask=known, other=float("-inf"))
    known = known & (keys > float("-inf"))
    order = tl.where(known, order_of(keys).to(tl.uint32, bitcast=True) ^ 0x80000000, 0)  # 0 is below every float
    many = (tl.sum(known.to(tl.int32), 0) > ROWS).to(tl.uint32)
    last = many & 0  # becomes the lowest order that is kept, or a value between it and the next lower one
    bit = many << 31
    while bit > 0:
        higher = last | bit
        found = tl.sum((order >= higher).to(tl.int32), 0)
        last = tl.where(found >= ROWS, higher, last)
        bit = (bit >> 1) * (found != ROWS).to(tl.uint32)
    above = known & (order > last)
    level = known & (order == last)
    free = ROWS - tl.sum(above.to(tl.int32), 0)
    running = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), 0)  # both prefix sums at once
    ties = running >> 16
    row = (running & 0xFFFF) + tl.minimum(ties, free) - 1
    chosen = above | (level & (ties <= free))
    total = tl.sum(chosen.to(tl.int32), 0)
    tl.store(kept + row, place.to(tl.int64), mask=chosen)
    one = tl.arange(0, BLOCK_N)
    tl.store(kept + one, tl.full([BLOCK_N], -1, tl.int64), mask=(one >= total) & (one < ROWS))
    tl.store(rows_at, total.to(tl.int64))
    tl.debug_barrier()

    other = tl.load(kept + one, mask=one < total, other=-1).to(tl.int32)
    at = tl.load(all_depth + tl.maximum(other, 0), mask=one < total, other=0).to(tl.int32)
    for start in range(0, ROWS, BLOCK_I):
        mine = start + tl.arange(0, BLOCK_I)
        inside = mine < ROWS
        real = mine < total
        node = tl.maximum(tl.load(kept + mine, mask=real, other=0), 0).to(tl.int32)
        parent = tl.load(all_parents + node, mask=real, other=-1).to(tl.int32)
        tl.store(tokens + mine, tl.load(all_tokens + node, mask=real, other=0), mask=inside)
        tl.store(depth + mine, tl.load(all_depth + node, mask=real, other=0), mask=inside)
        asked = real[:, None] & (one < total)[None, :]
        found = tl.load(ancestors + node[:, None] * (DEEPEST + 1) + at[None, :], mask=asked, other=-2).to(tl.int32)
        seen = found == other[None, :]
        cells = mask + mine[:, None] * mask_row + one[None, :]
        tl.store(cells, seen.to(tl.uint8), mask=inside[:, None] & (one < ROWS)[None, :])
        its = asked & (other[None, :] == parent[:, None])
        row_above = tl.sum(tl.where(its, tl.broadcast_to(one[None, :], (BLOCK_I, BLOCK_N)), 0), 1)
        tl.store(parents + mine, row_above.to(tl.int64), mask=inside)


def choose(
    tree: TreeArrays,
    rows: int,
    kept: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depth: Tensor,
    mask: Tensor,
    count: Tensor,
    limit: Tensor | None,
) -> None:
    capacity, columns = tree.ancestors.shape
    assert mask.stride(1) == 1 and all(x.is_contiguous() for x in (*tree, kept, tokens, parents, depth))
    block, across = power_of_two(capacity), power_of_two(rows)
    tile = TILE if across <= 128 else 4 * TILE
    _choose[(1,)](
        tree.key,
        tree.tokens,
        tree.parents,
        tree.depth,
        tree.ancestors,
        tree.count,
        tree.count if limit is None else limit,
        kept,
        tokens,
        parents,
        depth,
        mask.view(torch.uint8),
        count,
        mask.stride(0),
        LIMITED=limit is not None,
        CAPACITY=capacity,
        DEEPEST=columns - 1,
        ROWS=rows,
        BLOCK_C=block,
        BLOCK_N=across,
        BLOCK_I=min(across, max(tile // across, 1)),
        num_warps=4 if block <= 512 and rows <= 32 else 8,
        **pdl_trigger(kept),
    )
