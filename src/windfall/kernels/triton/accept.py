"""One program finds the accepted path and writes all results. Each thread writes those of its own rows."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.trees import TreeArrays
from windfall.kernels.triton.pdl import pdl_wait

TILE = 16384  # mask entries per iteration


@triton.jit
def _reset_to_root(
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
    token,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make the tree a single node, its root, except for its count."""
    zero = token * 0
    tl.store(tokens, token)
    tl.store(parents, zero - 1)
    tl.store(depth, zero)
    tl.store(rank, zero)
    tl.store(slot, zero)
    tl.store(logq, 0.0)
    tl.store(score, 0.0)
    tl.store(key, 0.0)
    tl.store(chance, 1.0)
    tl.store(taken, 1)
    column = tl.arange(0, BLOCK)
    tl.store(ancestors + column, tl.where(column == 0, zero, zero - 1), mask=column < COLUMNS)


@triton.jit
def _accept_path(
    draws,
    rows_tokens,
    rows_parents,
    rows_mask,
    rows_count,
    length_at,
    path,
    accepted_at,
    bonus_at,
    source,
    goal,
    pending,
    pending_count,
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
    expanded,
    staged_at,
    outcome,
    mask_row,
    ROWS: tl.constexpr,
    PATH: tl.constexpr,
    STEPS: tl.constexpr,
    PENDING: tl.constexpr,
    PENDING_COUNT: tl.constexpr,
    STAGED_ROWS: tl.constexpr,
    STAGED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program."""
    pdl_wait(PDL)
    node = tl.arange(0, BLOCK)
    inside = node < ROWS
    length = tl.load(length_at)
    count = tl.load(count_at)
    valid = tl.load(rows_count)
    token = tl.load(rows_tokens + node, mask=inside, other=0)
    rejected = tl.zeros([BLOCK], tl.int32)
    for start in range(0, ROWS, BLOCK_I):
        other = start + tl.arange(0, BLOCK_I)
        there = other < ROWS
        parent = tl.maximum(tl.load(rows_parents + other, mask=there, other=0), 0)
        drawn = tl.load(draws + parent, mask=there, other=0)
        missed = (tl.load(rows_tokens + other, mask=there, other=0) != drawn) & (other > 0)
        both = inside[:, None] & there[None, :]
        above = tl.load(rows_mask + node[:, None] * mask_row + other[None, :], mask=both, other=0).to(tl.int32)
        rejected = tl.maximum(rejected, tl.max(above * missed.to(tl.int32)[None, :], 1))
    accepts = inside & ((node < valid) | (node == 0)) & (rejected == 0)
    kept = accepts.to(tl.int32)
    accepted = tl.sum(kept, 0)
    place = tl.cumsum(kept, 0) - 1
    bonus = tl.load(draws + tl.max(tl.where(accepts, node, 0), 0))
    tl.debug_barrier()

    tl.store(path + place, node.to(tl.int64), mask=accepts)
    tl.store(accepted_at, accepted.to(tl.int64))
    tl.store(length_at, length + accepted)
    tl.store(bonus_at, bonus)
    tl.store(source + place, length + node, mask=accepts & (place < STEPS))
    step = tl.arange(0, BLOCK_P)
    tl.store(path + step, tl.full([BLOCK_P], -1, tl.int64), mask=(step >= accepted) & (step < PATH))
    tl.store(source + step, length + step, mask=(step >= accepted) & (step < STEPS))
    tl.store(goal + step, length + step, mask=step < STEPS)
    if PENDING > 0:
        tl.store(pending + place - 1, token, mask=accepts & (place > 0) & (place <= PENDING))
        tail = tl.where(step == accepted - 1, bonus, 0)
        tl.store(pending + step, tail, mask=(step >= accepted - 1) & (step < PENDING))
    if PENDING_COUNT:
        tl.store(pending_count, accepted.to(tl.int64))
    for start in range(0, STAGED_ROWS, BLOCK_S):
        other = start + tl.arange(0, BLOCK_S)
        tl.store(expanded + other, tl.full([BLOCK_S], -1, tl.int64), mask=other < STAGED_ROWS)
    if STAGED:
        tl.store(staged_at, count * 0)
    tl.store(outcome, count)
    tl.store(outcome + 1, valid)
    tl.store(outcome + 2, accepted.to(tl.int64))
    tl.store(outcome + 3, bonus)
    _reset_to_root(
        tokens, parents, depth, rank, logq, score, key, chance, taken, ancestors, slot, bonus, COLUMNS, BLOCK_D
    )
    tl.store(count_at, count * 0 + 1)


def accept_path(
    draws: Tensor,
    rows_tokens: Tensor,
    rows_parents: Tensor,
    rows_mask: Tensor,
    rows_count: Tensor,
    length: Tensor,
    path: Tensor,
    accepted: Tensor,
    bonus: Tensor,
    source: Tensor,
    goal: Tensor,
    pending: Tensor | None,
    pending_count: Tensor | None,
    tree: TreeArrays,
    expanded: Tensor | None,
    staged: Tensor | None,
    outcome: Tensor,
) -> None:
    rows, columns = len(draws), tree.ancestors.shape[1]
    given = (draws, rows_tokens, rows_parents, path, source, goal, pending, expanded, outcome, tree.ancestors)
    assert rows_mask.stride(1) == 1 and all(x.is_contiguous() for x in given if x is not None)
    assert len(path) >= rows and len(source) == len(goal)
    staged_rows, size = (0 if x is None else len(x) for x in (expanded, pending))
    _accept_path[(1,)](
        draws,
        rows_tokens,
        rows_parents,
        rows_mask.view(torch.uint8),
        rows_count,
        length,
        path,
        accepted,
        bonus,
        source,
        goal,
        *(bonus if x is None else x for x in (pending, pending_count)),
        *tree[:8],
        tree.taken.view(torch.uint8),
        tree.ancestors,
        tree.slot,
        tree.count,
        *(bonus if x is None else x for x in (expanded, staged)),
        outcome,
        rows_mask.stride(0),
        ROWS=rows,
        PATH=len(path),
        STEPS=len(source),
        PENDING=size,
        PENDING_COUNT=pending_count is not None,
        STAGED_ROWS=staged_rows,
        STAGED=staged is not None,
        COLUMNS=columns,
        BLOCK=power_of_two(rows),
        BLOCK_I=min(power_of_two(rows), TILE // power_of_two(rows)),
        BLOCK_S=min(power_of_two(staged_rows), 512),
        BLOCK_P=power_of_two(max(len(path), len(source), size)),
        BLOCK_D=power_of_two(columns),
        num_warps=4,
        **pdl_launch(draws),
    )
