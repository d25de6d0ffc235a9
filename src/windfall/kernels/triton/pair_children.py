"""Pair scores of the candidates of nodes, and their order: for the nodes of a pass, or level by level to the last."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.levels import MIN_REST, Levels, PairTables
from windfall.kernels.rules import Rule
from windfall.kernels.trees import Calibration, NextPass, TreeArrays
from windfall.kernels.triton.grow import _grow, arguments
from windfall.kernels.triton.pdl import pdl_wait

MAX_RANK_STEP = 64  # numbers of a pair score that a program multiplies at a time
TILE = 4096  # pair products of a program at a time


@triton.jit
def _score_candidates(
    levels,  # logq, tokens, hidden
    tables,  # before, after
    warmth,  # temperature, kappa
    token,
    depth,
    owner,
    live,
    goal,  # values, names
    first,  # of the nodes, in the goal
    rank_size,
    depths,
    COUNT: tl.constexpr,
    CANDIDATES: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,
    RANK_STEP: tl.constexpr,
    NODES: tl.constexpr,
    PAIRS: tl.constexpr,
    HIDDEN: tl.constexpr,
    NOISY: tl.constexpr,
    MIN_REST: tl.constexpr,
):
    """Write the K likeliest candidates after each of the nodes, which have these tokens and depths [NODES]."""
    logq, tokens, hidden = levels
    values, names = goal
    place = tl.arange(0, CANDIDATES)
    made = (place < COUNT)[None, :]
    inside = live & (depth >= 0) & (depth < depths)
    row = tl.where(inside, owner * depths + depth, 0)
    at = row[:, None] * COUNT + place[None, :]
    scores = tl.load(logq + at, mask=made, other=float("-inf"))
    name = tl.load(tokens + at, mask=made, other=0)
    rest = tl.maximum(1.0 - tl.sum(tl.exp(scores), 1), MIN_REST)
    if PAIRS:
        before, after = tables
        pairs = tl.zeros([NODES, CANDIDATES], tl.float32)
        for start in range(0, RANK, RANK_STEP):
            lane = start + tl.arange(0, RANK_STEP)
            real = (lane < rank_size)[None, :]
            query = tl.load(before + token[:, None] * rank_size + lane[None, :], mask=real, other=0.0).to(tl.float32)
            if HIDDEN:
                states = tl.load(hidden + row[:, None] * rank_size + lane[None, :], mask=real, other=0.0)
                query *= states.to(tl.float32)
            seen = made[:, :, None] & real[:, None, :]
            keys = tl.load(after + name[:, :, None] * rank_size + lane[None, None, :], mask=seen, other=0.0)
            pairs += tl.sum(keys.to(tl.float32) * query[:, None, :], 2)
        if NOISY:
            temperature_at, kappa_at = warmth
            temperature = tl.load(temperature_at + owner)[:, None]
            kappa = tl.load(kappa_at + owner)[:, None]
            pairs = tl.where(temperature == 0, pairs, pairs / (temperature * kappa))
        scores += pairs
    highest = tl.maximum(tl.max(scores, 1), tl.log(rest))
    total = tl.sum(tl.exp(scores - highest[:, None]), 1) + rest * tl.exp(-highest)
    scores = tl.where(inside[:, None], scores - highest[:, None] - tl.log(total)[:, None], float("-inf"))
    one, other = scores[:, :, None], scores[:, None, :]
    ahead = (other > one) | ((other == one) & (place[None, None, :] < place[None, :, None]))
    order = tl.sum((ahead & made[:, None, :]).to(tl.int32), 2)  # how many candidates come before
    chosen = made & (order < K) & live[:, None]
    cell = (first + tl.arange(0, NODES))[:, None] * K + order
    tl.store(values + cell, scores, mask=chosen)
    tl.store(names + cell, name, mask=chosen)


@triton.jit
def _pair_children(
    logq,
    tokens,
    hidden,
    before,
    after,
    temperature_at,
    kappa_at,
    rank_size,
    depths,
    previous,
    columns,
    lengths,
    owners,
    values,
    names,
    OFFSET: tl.constexpr,
    ROOTS: tl.constexpr,
    OWNED: tl.constexpr,
    COUNT: tl.constexpr,
    CANDIDATES: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,
    RANK_STEP: tl.constexpr,
    NODES: tl.constexpr,
    PAIRS: tl.constexpr,
    HIDDEN: tl.constexpr,
    NOISY: tl.constexpr,
    MIN_REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (node)."""
    pdl_wait(PDL)
    first = tl.program_id(0).to(tl.int64)
    node = first + tl.arange(0, NODES)
    owner = node * 0
    if OWNED:
        owner = tl.load(owners + node).to(tl.int64)
    depth = node * 0
    if not ROOTS:
        depth = tl.load(columns + node) - tl.load(lengths + owner) - OFFSET
    _score_candidates(
        (logq, tokens, hidden), (before, after), (temperature_at, kappa_at), tl.load(previous + node), depth, owner,
        node >= 0, (values, names), first, rank_size, depths, COUNT, CANDIDATES, K, RANK, RANK_STEP, NODES, PAIRS,
        HIDDEN, NOISY, MIN_REST,
    )  # fmt: skip


@triton.jit
def _grow_levels(
    logq, level_tokens, hidden, before, after, temperature_at, kappa_at, rank_size, depths, draft_lengths, passes,
    nodes, child_tokens, child_logq, tokens, parents, depth, rank, tree_logq, score, key, chance, taken, ancestors,
    slot, count_at, weights, forecast, prices, shape, bounds, floor, next_nodes, next_tokens, positions, slots,
    parent_slots, own_slots, mask, expanded, staged_at, length_at, base_at, summary, lineage, mask_row, shape_row,
    mask_rows, summary_rows, weights_row, forecast_row, prices_row,
    OFFSET: tl.constexpr, COUNT: tl.constexpr, CANDIDATES: tl.constexpr, RANK: tl.constexpr, RANK_STEP: tl.constexpr,
    PAIRS: tl.constexpr, HIDDEN: tl.constexpr, NOISY: tl.constexpr, MIN_REST: tl.constexpr,
    WHOLE: tl.constexpr, CALIBRATED: tl.constexpr, SHAPED: tl.constexpr, BOUNDED: tl.constexpr, FLOORED: tl.constexpr,
    DECAY: tl.constexpr, TOP: tl.constexpr, INCLUDE_LAST: tl.constexpr, BUDGET: tl.constexpr, LOG_SHARE: tl.constexpr,
    FIRST_WIDTH: tl.constexpr, FIRST_LEVELS: tl.constexpr, CAPACITY: tl.constexpr, MAX_DEPTH: tl.constexpr,
    PARENTS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, STAGED_ROWS: tl.constexpr, MASKED: tl.constexpr,
    LINEAGE: tl.constexpr, BATCH: tl.constexpr, CHILDREN: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_O: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (request): all levels after the first, each from the nodes that the one before has chosen."""
    pdl_wait(PDL)
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_W)
    live = lane < WIDTH
    root = tl.load(draft_lengths + request) + OFFSET
    for _ in range(passes):
        token = tl.load(next_tokens + request * WIDTH + lane, mask=live, other=0)
        column = tl.load(positions + request * WIDTH + lane, mask=live, other=0)
        _score_candidates(
            (logq, level_tokens, hidden), (before, after), (temperature_at, kappa_at), token, column - root,
            request + lane * 0, live, (child_logq, child_tokens), request * WIDTH, rank_size, depths, COUNT, CANDIDATES,
            K, RANK, RANK_STEP, BLOCK_W, PAIRS, HIDDEN, NOISY, MIN_REST,
        )  # fmt: skip
        tl.debug_barrier()  # the children are written
        _grow(
            nodes, child_tokens, child_logq, tokens, parents, depth, rank, tree_logq, score, key, chance, taken,
            ancestors, slot, count_at, weights, forecast, prices, shape, bounds, floor, next_nodes, next_tokens,
            positions, slots, parent_slots, own_slots, mask, expanded, staged_at, length_at, base_at, summary, lineage,
            mask_row, shape_row, mask_rows, summary_rows, weights_row, forecast_row, prices_row, WHOLE, CALIBRATED,
            SHAPED, BOUNDED, FLOORED, DECAY, TOP, INCLUDE_LAST, BUDGET, LOG_SHARE, FIRST_WIDTH, FIRST_LEVELS, CAPACITY,
            MAX_DEPTH, PARENTS, K, WIDTH, STAGED_ROWS, MASKED, LINEAGE, BATCH, CHILDREN, COLUMNS, BLOCK_W, BLOCK_K,
            BLOCK_N, BLOCK_C, BLOCK_S, BLOCK_O, False,
        )  # fmt: skip
        tl.debug_barrier()  # the nodes of the next pass are written


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
    given, fixed = _pair_arguments(levels, tables, warmth, 1)
    assert all(each is None or each.is_contiguous() for each in (previous, columns, lengths, owners))
    values = torch.empty((nodes, k), device=logq.device)
    names = torch.empty((nodes, k), dtype=torch.long, device=logq.device)
    _pair_children[(nodes,)](
        *given,
        previous,
        previous if columns is None else columns,
        lengths,
        previous if owners is None else owners,
        values,
        names,
        OFFSET=offset,
        ROOTS=columns is None,
        OWNED=owners is not None,
        K=k,
        NODES=1,
        **fixed,
        num_warps=1 if fixed["RANK"] <= MAX_RANK_STEP else 4,
        **pdl_launch(logq),
    )
    return values, names


def grow_levels(
    tree: TreeArrays,
    next_pass: NextPass,
    passes: int,
    k: int,
    rule: Rule,
    calibration: Calibration | None,
    levels: Levels,
    lengths: Tensor,
    offset: int,
    tables: PairTables | None,
    warmth: tuple[Tensor, Tensor] | None,
) -> None:
    """See `kernels.pair_children.grow_levels`."""
    nodes, logq = next_pass.nodes, levels.logq
    values = torch.empty((*nodes.shape, k), device=logq.device)
    names = torch.empty((*nodes.shape, k), dtype=torch.long, device=logq.device)
    grown, fixed = arguments(tree, nodes, names, values, next_pass, rule, calibration)
    given, scored = _pair_arguments(levels, tables, warmth, fixed["BLOCK_W"])
    assert lengths.is_contiguous()
    _grow_levels[(len(nodes) if nodes.dim() == 2 else 1,)](
        *given, lengths, passes, *grown, OFFSET=offset, **scored, **{**fixed, "num_warps": 8}, **pdl_launch(logq)
    )


def _pair_arguments(
    levels: Levels, tables: PairTables | None, warmth: tuple[Tensor, Tensor] | None, nodes: int
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of kernels that score candidates of this number of nodes, and what they are compiled for."""
    logq, hidden, rank = levels.logq, levels.hidden, 1 if tables is None else tables.before.shape[1]
    assert all(each is None or each.is_contiguous() for each in (*levels[:4], *(tables or ()), *(warmth or ())))
    candidates = power_of_two(levels.candidates)
    given = [
        logq,
        levels.tokens,
        logq if hidden is None else hidden,
        *((logq, logq) if tables is None else tables),
        *((logq, logq) if warmth is None else warmth),
        rank,
        levels.depth,
    ]
    return given, {
        "COUNT": levels.candidates,
        "CANDIDATES": candidates,
        "RANK": power_of_two(rank),
        "RANK_STEP": min(power_of_two(rank), MAX_RANK_STEP, max(TILE // (nodes * candidates), 1)),
        "PAIRS": tables is not None,
        "HIDDEN": hidden is not None,
        "NOISY": warmth is not None,
        "MIN_REST": MIN_REST,
    }
