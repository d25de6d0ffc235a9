"""Pair scores of the candidates of nodes, and their order; and the growth of trees through all levels.

A node's children depend on its token and level alone, and its token is one of its level's candidates. So the children
of all candidates are computed at once, and the passes of a tree only look them up.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.levels import MIN_REST, Carries, Levels, PairTables
from windfall.kernels.rules import Rule
from windfall.kernels.trees import Calibration, NextPass, TreeArrays
from windfall.kernels.triton.grow import _grow, arguments
from windfall.kernels.triton.pdl import pdl_wait

MAX_RANK_STEP = 256  # numbers of a pair score that a program multiplies at a time
TILE = 4096  # pair products of a program at a time
MAX_CELLS = 256  # children of a level up to which one warp grows it: its many reductions then need no shared memory


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _number(at, lane, real):
    return tl.load(at + lane, mask=real, other=0.0).to(tl.float32)


@triton.jit
def _joint(
    part: tl.constexpr, token, state, carried, carry, lane, real, rank_size, RANK: tl.constexpr, PATH: tl.constexpr
):
    """A part of the input of a recurrence, at these lanes."""
    found = _number(token + part * rank_size, lane, real) + _number(state + part * rank_size, lane, real)
    if PATH:
        column = tl.arange(0, RANK)
        known = column < rank_size
        weight = carried + (part * rank_size + lane)[:, None] * rank_size + column[None, :]
        weight = tl.load(weight, mask=real[:, None] & known[None, :], other=0.0).to(tl.float32)
        found += tl.sum(weight * _number(carry, column, known)[None, :], 1)
    return found


@triton.jit
def _query(
    token,  # its part of `before`
    state,  # of the level, if HIDDEN
    path,  # carried, the carry of the parent, that of the node
    lane,
    real,
    rank_size,
    inside,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    PATH: tl.constexpr,
):
    """The query at these lanes, see `PairTables`."""
    if PARTS == 1:
        query = _number(token, lane, real)
        if HIDDEN:
            query *= _number(state, lane, real)
    elif PARTS == 2:
        gate = tl.sigmoid(_number(token, lane, real) + _number(state, lane, real))
        query = gate * _number(token + rank_size, lane, real)
    else:
        carried, carry, made = path
        gate = tl.sigmoid(_joint(0, token, state, carried, carry, lane, real, rank_size, RANK, PATH))
        fresh = (1 - gate) * _tanh(_joint(1, token, state, carried, carry, lane, real, rank_size, RANK, PATH))
        if PATH:
            fresh += gate * _number(carry, lane, real)
        tl.store(made + lane, fresh, mask=lane < tl.where(inside, rank_size, 0))
        query = _tanh(_joint(2, token, state, carried, carry, lane, real, rank_size, RANK, PATH))
    return query


@triton.jit
def _pair_scores(
    tables,  # before, after
    states,  # of the level, if HIDDEN
    path,  # see `_query`
    token,
    names,
    made,
    rank_size,
    inside,
    CANDIDATES: tl.constexpr,
    RANK: tl.constexpr,
    RANK_STEP: tl.constexpr,
    PARTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    PATH: tl.constexpr,
):
    """The scores of these candidates after a token → [CANDIDATES]."""
    before, after = tables
    token_at = before + token * rank_size * PARTS
    scores = tl.zeros([CANDIDATES], tl.float32)
    for start in tl.static_range(0, RANK, RANK_STEP):
        lane = start + tl.arange(0, RANK_STEP)
        real = lane < rank_size
        query = _query(token_at, states, path, lane, real, rank_size, inside, RANK, PARTS, HIDDEN, PATH)
        seen = made[:, None] & real[None, :]
        keys = tl.load(after + names[:, None] * rank_size + lane[None, :], mask=seen, other=0.0)
        scores += tl.sum(keys.to(tl.float32) * query[None, :], 1)
    return scores


@triton.jit
def _pair_children(
    logq,
    tokens,
    hidden,
    before,
    after,
    carried,
    carries,
    above,
    here,
    temperature_at,
    kappa_at,
    rank_size,
    depths,
    previous,
    columns,
    lengths,
    owners,
    given,  # nodes; the programs after them are for all candidates of all levels but the last
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
    PARTS: tl.constexpr,
    STATES: tl.constexpr,
    HIDDEN: tl.constexpr,
    PATH: tl.constexpr,
    NOISY: tl.constexpr,
    MIN_REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (node): write its K likeliest children. PARTS 0: there are no pair scores."""
    pdl_wait(PDL)
    node = tl.program_id(0).to(tl.int64)
    if node < given:
        token = tl.load(previous + node)
        owner = node * 0
        if OWNED:
            owner = tl.load(owners + node).to(tl.int64)
        depth = node * 0
        if not ROOTS:
            depth = tl.load(columns + node) - tl.load(lengths + owner) - OFFSET
    else:
        level = (node - given) // COUNT  # over all requests
        owner = level // (depths - 1)
        depth = level % (depths - 1) + 1
        token = tl.load(tokens + (level + owner) * COUNT + (node - given) % COUNT)
    inside = (depth >= 0) & (depth < depths)
    row = tl.where(inside, owner * depths + depth, 0)
    place = tl.arange(0, CANDIDATES)
    made = place < COUNT
    scores = tl.load(logq + row * COUNT + place, mask=made, other=float("-inf"))
    name = tl.load(tokens + row * COUNT + place, mask=made, other=0)
    rest = tl.maximum(1.0 - tl.sum(tl.exp(scores), 0), MIN_REST)
    if PARTS:
        states = hidden + row * rank_size * STATES
        carry, made_carry = carries, carries
        if PARTS == 3:
            made_carry += tl.load(here + node) * rank_size
        if PATH:
            carry += tl.load(above + node) * rank_size
        path = (carried, carry, made_carry)
        tables = (before, after)
        pairs = _pair_scores(
            tables, states, path, token, name, made, rank_size, inside,
            CANDIDATES, RANK, RANK_STEP, PARTS, HIDDEN, PATH,
        )  # fmt: skip
        if NOISY:
            temperature = tl.load(temperature_at + owner)
            kappa = tl.load(kappa_at + owner)
            pairs = tl.where(temperature == 0, pairs, pairs / (temperature * kappa))
        scores += pairs
    highest = tl.maximum(tl.max(scores, 0), tl.log(rest))
    total = tl.sum(tl.exp(scores - highest), 0) + rest * tl.exp(-highest)
    scores = tl.where(inside, scores - highest - tl.log(total), float("-inf"))
    one, other = scores[:, None], scores[None, :]
    ahead = (other > one) | ((other == one) & (place[None, :] < place[:, None]))
    order = tl.sum((ahead & made[None, :]).to(tl.int32), 1)  # how many candidates come before
    chosen = made & (order < K)
    tl.store(values + node * K + order, scores, mask=chosen)
    tl.store(names + node * K + order, name, mask=chosen)


@triton.jit
def _grow_levels(
    level_tokens, depths, draft_lengths, passes,
    nodes, child_tokens, child_logq, tokens, parents, depth, rank, logq, score, key, chance, taken, ancestors,
    slot, count_at, weights, forecast, prices, shape, bounds, floor, next_nodes, next_tokens, positions, slots,
    parent_slots, own_slots, mask, expanded, staged_at, length_at, base_at, summary, lineage, mask_row, shape_row,
    mask_rows, summary_rows, weights_row, forecast_row, prices_row,
    OFFSET: tl.constexpr, COUNT: tl.constexpr, CANDIDATES: tl.constexpr,
    WHOLE: tl.constexpr, CALIBRATED: tl.constexpr, SHAPED: tl.constexpr, BOUNDED: tl.constexpr, FLOORED: tl.constexpr,
    DECAY: tl.constexpr, TOP: tl.constexpr, INCLUDE_LAST: tl.constexpr, BUDGET: tl.constexpr, LOG_SHARE: tl.constexpr,
    FIRST_WIDTH: tl.constexpr, FIRST_LEVELS: tl.constexpr, CAPACITY: tl.constexpr, MAX_DEPTH: tl.constexpr,
    PARENTS: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, STAGED_ROWS: tl.constexpr, MASKED: tl.constexpr,
    LINEAGE: tl.constexpr, BATCH: tl.constexpr, CHILDREN: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_O: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (request): all levels after the first, each from the nodes that the one before has chosen.

    The children are those of the roots, then of all candidates, see `_pair_children`.
    """
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_W)
    live = lane < WIDTH
    place = tl.arange(0, CANDIDATES)
    root = tl.load(draft_lengths + request) + OFFSET
    pdl_wait(PDL)
    for _ in range(passes):
        token = tl.load(next_tokens + request * WIDTH + lane, mask=live, other=0)
        level = tl.load(positions + request * WIDTH + lane, mask=live, other=0) - root - 1
        inside = live & (level >= 0) & (level < depths - 1)
        level = tl.where(inside, level, 0)
        at = (request * depths + level)[:, None] * COUNT + place[None, :]
        known = tl.load(level_tokens + at, mask=inside[:, None] & (place < COUNT)[None, :], other=-1)
        own = tl.min(tl.where(known == token[:, None], place[None, :], CANDIDATES), 1)
        source = tl.num_programs(0) + (request * (depths - 1) + level) * COUNT + own
        _grow(
            nodes, child_tokens, child_logq, tokens, parents, depth, rank, logq, score, key, chance, taken,
            ancestors, slot, count_at, weights, forecast, prices, shape, bounds, floor, next_nodes, next_tokens,
            positions, slots, parent_slots, own_slots, mask, expanded, staged_at, length_at, base_at, summary, lineage,
            mask_row, shape_row, mask_rows, summary_rows, weights_row, forecast_row, prices_row,
            tl.where(own < CANDIDATES, source, -1), WHOLE, CALIBRATED, SHAPED, BOUNDED, FLOORED, DECAY, TOP,
            INCLUDE_LAST, BUDGET, LOG_SHARE, FIRST_WIDTH, FIRST_LEVELS, CAPACITY, MAX_DEPTH, PARENTS, K, WIDTH,
            STAGED_ROWS, MASKED, LINEAGE, BATCH, CHILDREN, COLUMNS, BLOCK_W, BLOCK_K, BLOCK_N, BLOCK_C, BLOCK_S,
            BLOCK_O, False,
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
    carries: Carries | None,
    *,
    k: int,
    further: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `kernels.pair_children.pair_children`. Further rows are the children of the levels' candidates, in order."""
    logq, hidden, rank = levels.logq, levels.hidden, 1 if tables is None else tables.rank
    parts = 0 if tables is None else tables.parts
    assert not further or carries is None
    above, here = (None, None) if carries is None else carries[1:]
    given = (*levels[:4], *(tables or ()), *(warmth or ()), *(carries or ()))
    assert all(each is None or each.is_contiguous() for each in given)
    assert all(each is None or each.is_contiguous() for each in (previous, columns, lengths, owners))
    nodes, candidates, lanes = len(previous), power_of_two(levels.candidates), power_of_two(rank)
    values = torch.empty((nodes + further, k), device=logq.device)
    names = torch.empty((nodes + further, k), dtype=torch.long, device=logq.device)
    _pair_children[(nodes + further,)](
        logq,
        levels.tokens,
        logq if hidden is None else hidden,
        *((logq, logq) if tables is None else tables[:2]),
        logq if tables is None or tables.carried is None else tables.carried,
        logq if carries is None else carries.states,
        previous if above is None else above,
        previous if here is None else here,
        *((logq, logq) if warmth is None else warmth),
        rank,
        levels.depth,
        previous,
        previous if columns is None else columns,
        lengths,
        previous if owners is None else owners,
        nodes,
        values,
        names,
        OFFSET=offset,
        ROOTS=columns is None,
        OWNED=owners is not None,
        COUNT=levels.candidates,
        CANDIDATES=candidates,
        K=k,
        RANK=lanes,
        RANK_STEP=min(lanes, MAX_RANK_STEP, max(TILE // max(candidates, lanes if parts == 3 else 1), 1)),
        PARTS=parts,
        STATES=3 if parts == 3 else 1,
        HIDDEN=hidden is not None,
        PATH=above is not None,
        NOISY=warmth is not None,
        MIN_REST=MIN_REST,
        num_warps=1 if parts < 3 and candidates * lanes <= TILE // 4 else 4,
        **pdl_launch(logq),
    )
    return values, names


def grow_levels(
    tree: TreeArrays,
    next_pass: NextPass,
    passes: int,
    rule: Rule,
    calibration: Calibration | None,
    levels: Levels,
    lengths: Tensor,
    offset: int,
    values: Tensor,
    names: Tensor,
) -> None:
    """The passes after the first, with the children of the roots and of all candidates."""
    nodes = next_pass.nodes
    given, fixed = arguments(tree, nodes, names, values, next_pass, rule, calibration)
    assert lengths.is_contiguous() and levels.tokens.is_contiguous()
    plain = not (rule.whole or rule.calibrated or rule.selective)  # other rules need more registers than a warp has
    one_warp = plain and fixed["BLOCK_W"] * fixed["BLOCK_K"] <= MAX_CELLS
    _grow_levels[(len(nodes) if nodes.dim() == 2 else 1,)](
        levels.tokens,
        levels.depth,
        lengths,
        passes,
        *given,
        OFFSET=offset,
        COUNT=levels.candidates,
        CANDIDATES=power_of_two(levels.candidates),
        **{**fixed, "num_warps": 1 if one_warp else 8},
        **pdl_launch(nodes),
    )
