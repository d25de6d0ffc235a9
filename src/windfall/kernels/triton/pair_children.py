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
    previous,
    columns,
    lengths,
    temperature_at,
    kappa_at,
    owners,
    values,
    names,
    rank_size,
    depths,
    OFFSET: tl.constexpr,
    COUNT: tl.constexpr,
    CANDIDATES: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,
    ROOTS: tl.constexpr,
    PAIRS: tl.constexpr,
    HIDDEN: tl.constexpr,
    NOISY: tl.constexpr,
    OWNED: tl.constexpr,
    MIN_REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (node)."""
    pdl_wait(PDL)
    node = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, CANDIDATES)
    made = place < COUNT
    owner = node * 0
    if OWNED:
        owner = tl.load(owners + node).to(tl.int64)
    depth = node * 0
    if not ROOTS:
        depth = tl.load(columns + node) - tl.load(lengths + owner) - OFFSET
    inside = (depth >= 0) & (depth < depths)
    row = tl.where(inside, owner * depths + depth, 0)
    at = row * COUNT + place
    scores = tl.load(logq + at, mask=made, other=float("-inf"))
    name = tl.load(tokens + at, mask=made, other=0)
    rest = tl.maximum(1.0 - tl.sum(tl.exp(scores), 0), MIN_REST)
    if PAIRS:
        lane = tl.arange(0, RANK)
        real = lane < rank_size
        query = tl.load(before + tl.load(previous + node) * rank_size + lane, mask=real, other=0.0).to(tl.float32)
        if HIDDEN:
            query *= tl.load(hidden + row * rank_size + lane, mask=real, other=0.0).to(tl.float32)
        seen = made[:, None] & real[None, :]
        keys = tl.load(after + name[:, None] * rank_size + lane[None, :], mask=seen, other=0.0).to(tl.float32)
        pairs = tl.sum(keys * query[None, :], 1)
        if NOISY:
            temperature = tl.load(temperature_at + owner)
            pairs = tl.where(temperature == 0, pairs, pairs / (temperature * tl.load(kappa_at + owner)))
        scores += pairs
    highest = tl.maximum(tl.max(scores, 0), tl.log(rest))
    total = tl.sum(tl.exp(scores - highest), 0) + rest * tl.exp(-highest)
    scores = tl.where(inside, scores - highest - tl.log(total), float("-inf"))
    first = (scores[None, :] > scores[:, None]) | (
        (scores[None, :] == scores[:, None]) & (place[None, :] < place[:, None])
    )
    order = tl.sum((first & made[None, :]).to(tl.int32), 1)  # how many candidates come before
    chosen = made & (order < K)
    tl.store(values + node * K + order, scores, mask=chosen)
    tl.store(names + node * K + order, name, mask=chosen)


def pair_children(
    levels: Levels,
    previous: Tensor,
    columns: Tensor | None,
    lengths: Tensor,
    offset: int,
    tables: PairTables | None,
    warmth: tuple[Tensor, Tensor] | None,
    owners: Tensor | None,
    *,
    k: int,
) -> tuple[Tensor, Tensor]:
    nodes, logq = len(previous), levels.logq
    rank = 1 if tables is None else tables.before.shape[1]
    arrays = (logq, levels.tokens, levels.hidden, previous, columns, lengths, owners, *(tables or ()), *(warmth or ()))
    assert all(each is None or each.is_contiguous() for each in arrays)
    values = torch.empty((nodes, k), device=logq.device)
    names = torch.empty((nodes, k), dtype=torch.long, device=logq.device)
    _pair_children[(nodes,)](
        logq,
        levels.tokens,
        logq if levels.hidden is None else levels.hidden,
        *((logq, logq) if tables is None else tables),
        previous,
        previous if columns is None else columns,
        lengths,
        *((logq, logq) if warmth is None else warmth),
        previous if owners is None else owners,
        values,
        names,
        rank,
        levels.depth,
        OFFSET=offset,
        COUNT=levels.candidates,
        CANDIDATES=power_of_two(levels.candidates),
        K=k,
        RANK=power_of_two(rank),
        ROOTS=columns is None,
        PAIRS=tables is not None,
        HIDDEN=levels.hidden is not None,
        NOISY=warmth is not None,
        OWNED=owners is not None,
        MIN_REST=MIN_REST,
        num_warps=1 if rank <= 64 else 4,
        **pdl_launch(logq),
    )
    return values, names
