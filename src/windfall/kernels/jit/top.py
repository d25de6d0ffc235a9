"""Two kernels: each stretch of columns gives its k best and its share of the normaliser, then rows merge theirs.

A score and its column are one 64-bit number that sorts like the score and, at ties, against the column: the best is a
plain maximum, and no two are equal.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, leads, power_of_two
from windfall.kernels.jit.chain import begin
from windfall.kernels.jit.noise import gumbel, noise_key

NONE = tl.constexpr(-(2**63))


@triton.jit
def _pack(scores, columns):
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers they sort like the floats
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)


@triton.jit
def _score(packed):
    ordered = (packed >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _column(packed):
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF)


@triton.jit
def _stretch(
    logits,
    positions,
    seed_at,
    temperature_at,
    kappa_at,
    tokens,
    best,
    tops,
    totals,
    width,
    logits_row,
    OFFSET: tl.constexpr,
    DICE: tl.constexpr,
    NAMED: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (row, stretch)."""
    begin(CHAINED)
    row = tl.program_id(0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    scores = tl.load(logits + row.to(tl.int64) * logits_row + column, mask=inside, other=float("-inf")).to(tl.float32)
    if DICE:
        key = noise_key(tl.load(seed_at), tl.load(positions + row) + OFFSET)
        names = column.to(tl.int64)
        if NAMED:
            names = tl.load(tokens + column, mask=inside, other=0)
        zeros = tl.zeros_like(scores)
        scores = tl.div_rn(scores, zeros + tl.load(temperature_at)) + gumbel(key, names)
        scores = tl.div_rn(scores, zeros + tl.load(kappa_at))
    top = tl.max(scores, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + place, top)
    tl.store(totals + place, tl.sum(tl.exp(scores - base), 0))
    packed = tl.where(inside, _pack(scores, column), NONE)
    for rank in range(K):
        first = tl.max(packed, 0)
        tl.store(best + place * K + rank, first)
        packed = tl.where(packed == first, NONE, packed)


@triton.jit
def _merge(
    best,
    tops,
    totals,
    tokens,
    values,
    names,
    stretches,
    NAMED: tl.constexpr,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    STRETCHES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (row)."""
    begin(CHAINED)
    row = tl.program_id(0)
    stretch = tl.arange(0, STRETCHES)
    made = stretch < stretches
    top = tl.load(tops + row * stretches + stretch, mask=made, other=float("-inf"))
    total = tl.load(totals + row * stretches + stretch, mask=made, other=0.0)
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    normaliser = tl.log(tl.sum(total * tl.exp(top - base), 0))
    one = tl.arange(0, BLOCK)
    packed = tl.load(best + row * stretches * K + one, mask=one < stretches * K, other=NONE)
    rank = tl.arange(0, RANKS)
    found = tl.full([RANKS], NONE, tl.int64)
    for turn in range(K):  # nothing is loaded or stored in it, for which the next turn would wait
        first = tl.max(packed, 0)
        found = tl.where(rank == turn, first, found)
        packed = tl.where(packed == first, NONE, packed)
    name = _column(found)
    if NAMED:
        name = tl.load(tokens + name, mask=rank < K, other=0)
    tl.store(values + row * K + rank, _score(found) - base - normaliser, mask=rank < K)
    tl.store(names + row * K + rank, name, mask=rank < K)


def stretch_of(width: int) -> tuple[int, int]:
    """Columns of a program and its warps: 16 columns for each thread."""
    if width <= 32_768:
        return 512, 1
    return (1024, 2) if width <= 65_536 else (2048, 4)


def top_children(
    logits: Tensor,
    k: int,
    positions: Tensor | None,
    seed: Tensor | None,
    temperature: Tensor | None,
    kappa: Tensor | None,
    tokens: Tensor | None,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    (rows, width), device = logits.shape, logits.device
    assert logits.stride(1) == 1
    block, warps = stretch_of(width)
    stretches = -(-width // block)
    best = torch.empty((rows, stretches, k), dtype=torch.long, device=device)
    parts = torch.empty((2, rows, stretches), device=device)
    values = torch.empty((rows, k), device=device)
    names = torch.empty((rows, k), dtype=torch.long, device=device)
    mapped = names if tokens is None else tokens
    dice = (logits, logits, logits, logits) if positions is None else (positions, seed, temperature, kappa)
    _stretch[(rows, stretches)](
        logits,
        *dice,
        mapped,
        best,
        parts[0],
        parts[1],
        width,
        logits.stride(0),
        OFFSET=offset,
        DICE=positions is not None,
        NAMED=tokens is not None,
        K=k,
        BLOCK=block,
        num_warps=warps,
        **leads(logits),
    )
    candidates = power_of_two(stretches * k)
    _merge[(rows,)](
        best,
        parts[0],
        parts[1],
        mapped,
        values,
        names,
        stretches,
        NAMED=tokens is not None,
        K=k,
        RANKS=power_of_two(k),
        STRETCHES=power_of_two(stretches),
        BLOCK=candidates,
        num_warps=max(1, min(8, candidates // 512)),
        **follows(logits),
    )
    return values, names
