"""Pair scores of a node's candidates, and their order, in one program for each node."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.levels import MIN_REST, Levels, PairTables
from windfall.kernels.triton.pdl import pdl_wait


@triton.jit
def _pair_children(
    logq,
    tokens,
    hidden,
    before,
    after,
    rows,
    previous,
    scale,
    owners,
    values,
    names,
    rank_size,
    COUNT: tl.constexpr,
    CANDIDATES: tl.constexpr,
    RANK: tl.constexpr,
    PAIRS: tl.constexpr,
    HIDDEN: tl.constexpr,
    SCALED: tl.constexpr,
    OWNED: tl.constexpr,
    MIN_REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (node)."""
    pdl_wait(PDL)
    node = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, CANDIDATES)
    made = place < COUNT
    row = tl.load(rows + node)
    at = tl.maximum(row, 0).to(tl.int64) * COUNT + place
    scores = tl.load(logq + at, mask=made, other=float("-inf"))
    name = tl.load(tokens + at, mask=made, other=0)
    rest = tl.maximum(1.0 - tl.sum(tl.exp(scores), 0), MIN_REST)
    if PAIRS:
        lane = tl.arange(0, RANK)
        real = lane < rank_size
        query = tl.load(before + tl.load(previous + node) * rank_size + lane, mask=real, other=0.0).to(tl.float32)
        if HIDDEN:
            query *= tl.load(hidden + tl.maximum(row, 0).to(tl.int64) * rank_size + lane, mask=real, other=0.0).to(
                tl.float32
            )
        seen = made[:, None] & real[None, :]
        keys = tl.load(after + name[:, None] * rank_size + lane[None, :], mask=seen, other=0.0).to(tl.float32)
        pairs = tl.sum(keys * query[None, :], 1)
        if SCALED:
            owner = node * 0
            if OWNED:
                owner = tl.load(owners + node).to(tl.int64)
            pairs *= tl.load(scale + owner)
        scores += pairs
    highest = tl.maximum(tl.max(scores, 0), tl.log(rest))
    total = tl.sum(tl.exp(scores - highest), 0) + rest * tl.exp(-highest)
    scores = tl.where(row >= 0, scores - highest - tl.log(total), float("-inf"))
    first = (scores[None, :] > scores[:, None]) | (
        (scores[None, :] == scores[:, None]) & (place[None, :] < place[:, None])
    )
    order = tl.sum((first & made[None, :]).to(tl.int32), 1)  # how many candidates come before
    goal = node * COUNT + order
    tl.store(values + goal, scores, mask=made)
    tl.store(names + goal, name, mask=made)


def pair_children(
    levels: Levels,
    rows: Tensor,
    previous: Tensor,
    tables: PairTables | None,
    scale: Tensor | None = None,
    owners: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    count, nodes, logq = levels.logq.shape[1], len(rows), levels.logq
    rank = 1 if tables is None else tables.before.shape[1]
    arrays = (logq, levels.tokens, levels.hidden, rows, previous, scale, owners, *(tables or ()))
    assert all(each is None or each.is_contiguous() for each in arrays)
    values = torch.empty((nodes, count), device=logq.device)
    names = torch.empty((nodes, count), dtype=torch.long, device=logq.device)
    _pair_children[(nodes,)](
        logq,
        levels.tokens,
        logq if levels.hidden is None else levels.hidden,
        *((logq, logq) if tables is None else tables),
        rows,
        previous,
        logq if scale is None else scale,
        rows if owners is None else owners,
        values,
        names,
        rank,
        COUNT=count,
        CANDIDATES=power_of_two(count),
        RANK=power_of_two(rank),
        PAIRS=tables is not None,
        HIDDEN=levels.hidden is not None,
        SCALED=scale is not None,
        OWNED=owners is not None,
        MIN_REST=MIN_REST,
        num_warps=1 if rank <= 64 else 4,
        **pdl_launch(logq),
    )
    return values, names
