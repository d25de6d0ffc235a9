"""Two kernels: stretches of columns give their highest scores and their share of the normaliser; then each row looks
for its k best in the k stretches that reach highest, since no other can hold one of them.

The first kernel reads logits, or makes them, and then they are written down only for the second to look at. It makes
them without noise, or with one that it can look up: logarithms want more programs than a product.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, leads, power_of_two, shared_memory
from windfall.kernels.triton.chain import begin
from windfall.kernels.triton.grow import NONE, best, order_of, value_of
from windfall.kernels.triton.noise import gumbel, noise_key

STRETCH = 64  # columns, the least
STRETCHES = 1024  # of a row, at the most, where stretches may be longer
PACKABLE = 2**16  # columns that have a name of 16 bits
ROWS = 16  # that a product is made for
PART = 64  # numbers of a row that are multiplied at a time
WORDS = 128  # columns of a program that multiplies, at the least
STAGES = 6  # of these parts on their way, at the most


@triton.jit
def _shaken(scores, noise, temperature_at, kappa_at):
    """By what the target will draw."""
    zeros = tl.zeros_like(scores)
    return tl.div_rn(tl.div_rn(scores, zeros + tl.load(temperature_at)) + noise, zeros + tl.load(kappa_at))


@triton.jit
def _stretches(
    logits,
    positions,
    seed_at,
    temperature_at,
    kappa_at,
    noise,
    tokens,
    scored,
    tops,
    totals,
    width,
    count,
    logits_row,
    noise_row,
    OFFSET: tl.constexpr,
    DICE: tl.constexpr,
    KNOWN: tl.constexpr,
    NAMED: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (row, PARTS of its `count` stretches)."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    column = part[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = column < width
    scores = tl.load(logits + row * logits_row + column, mask=inside, other=float("-inf")).to(tl.float32)
    if DICE:
        names = column.to(tl.int64)
        if NAMED:
            names = tl.load(tokens + column, mask=inside, other=0)
        position = tl.load(positions + row) + OFFSET
        if KNOWN > 0:
            added = tl.load(noise + position % KNOWN * noise_row + names, mask=inside, other=0.0)
        else:
            added = gumbel(noise_key(tl.load(seed_at), position), names)
        scores = _shaken(scores, added, temperature_at, kappa_at)
        tl.store(scored + row * width + column, scores, mask=inside)
    top = tl.max(scores, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + row * count + part, top, mask=part < count)
    tl.store(totals + row * count + part, tl.sum(tl.exp(scores - base[:, None]), 1), mask=part < count)


@triton.jit(do_not_specialize=["rows"])
def _multiplied(
    x,
    weight,
    bias,
    positions,
    temperature_at,
    kappa_at,
    noise,
    tokens,
    scored,
    tops,
    totals,
    rows,
    width,
    x_row,
    noise_row,
    BIAS: tl.constexpr,
    OFFSET: tl.constexpr,
    KNOWN: tl.constexpr,
    NAMED: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (N columns): all rows. Rounds as a product of torch would, then goes on as `_stretches`."""
    begin(CHAINED)
    column = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.arange(0, M)
    live = row < rows
    sums = tl.zeros([N, M], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        words = tl.load(weight + column[:, None].to(tl.int64) * K + k[None, :])
        states = tl.load(x + row[None, :] * x_row + k[:, None], mask=live[None, :], other=0.0)
        sums = tl.dot(words, states, sums)
    if BIAS:
        sums += tl.load(bias + column).to(tl.float32)[:, None]
    scores = sums.to(x.dtype.element_ty).to(tl.float32)
    if KNOWN > 0:
        names = column.to(tl.int64)
        if NAMED:
            names = tl.load(tokens + column)
        position = tl.load(positions + row, mask=live, other=0) + OFFSET
        place = (position % KNOWN * noise_row)[None, :] + names[:, None]
        scores = _shaken(scores, tl.load(noise + place, mask=live[None, :], other=0.0), temperature_at, kappa_at)
    goal = scored + row[None, :].to(tl.int64) * width + column[:, None]
    tl.store(goal, scores.to(scored.dtype.element_ty), mask=live[None, :])
    PARTS: tl.constexpr = N // SIZE
    apart = tl.reshape(scores, (PARTS, SIZE, M))
    top = tl.max(apart, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    part = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    place = row[None, :] * (width // SIZE) + part[:, None]
    tl.store(tops + place, top, mask=live[None, :])
    tl.store(totals + place, tl.sum(tl.exp(apart - base[:, None, :]), 1), mask=live[None, :])


@triton.jit
def _highest(order, name, COUNT: tl.constexpr, RANKS: tl.constexpr, PACKED: tl.constexpr):
    """`best`; packed, a name of 16 bits and the upper half of an order, all there is of a bf16, are one number,
    and each turn has one reduction."""
    if PACKED:
        rank = tl.arange(0, RANKS)
        found = tl.full([RANKS], NONE, tl.int32)
        order = tl.where(order == NONE, NONE, (order & -65536) | (65535 - name))
        for turn in range(COUNT):
            first = tl.max(order, 0)
            found = tl.where(rank == turn, first, found)
            order = tl.where(order == first, NONE, order)
        names = 65535 - (found & 65535)
        orders = tl.where(found == NONE, NONE, (found & -65536) | ((found >> 31) & 65535))
    else:
        names, orders = best(order, name, COUNT, RANKS)
    return names, orders


@triton.jit
def _pick(
    scored,
    tops,
    totals,
    tokens,
    values,
    names,
    width,
    count,
    scored_row,
    NAMED: tl.constexpr,
    PACKED: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (row)."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.arange(0, BLOCK)
    made = stretch < count
    top = tl.load(tops + row * count + stretch, mask=made, other=float("-inf"))
    total = tl.load(totals + row * count + stretch, mask=made, other=0.0)
    where, reached = _highest(tl.where(made, order_of(top), NONE), stretch, K, RANKS, PACKED)
    column = where[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (reached > NONE)[:, None] & (column < width)
    scores = tl.load(scored + row * scored_row + column, mask=inside, other=0.0).to(tl.float32)
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    normaliser = tl.log(tl.sum(total * tl.exp(top - base), 0))
    order = tl.reshape(tl.where(inside, order_of(scores), NONE), (RANKS * SIZE,))
    found, orders = _highest(order, tl.reshape(column, (RANKS * SIZE,)), K, RANKS, PACKED)
    rank = tl.arange(0, RANKS)
    name = found.to(tl.int64)
    if NAMED:
        name = tl.load(tokens + found, mask=rank < K, other=0)
    tl.store(values + row * K + rank, value_of(orders) - base - normaliser, mask=rank < K)
    tl.store(names + row * K + rank, name, mask=rank < K)


def size_of(width: int) -> int:
    """Columns of a stretch."""
    return max(STRETCH, power_of_two(-(-width // STRETCHES)))


class Top:
    """What both kernels leave and find: scores of [rows, width], and what each stretch of them reaches."""

    def __init__(self, rows: int, width: int, k: int, device: torch.device, tokens: Tensor | None):
        self.rows, self.width, self.k, self.tokens = rows, width, k, tokens
        self.size = size_of(width)
        self.count = -(-width // self.size)
        self.tops, self.totals = torch.empty((2, rows, self.count), device=device)
        self.names = torch.empty((rows, k), dtype=torch.long, device=device)

    @property
    def mapped(self) -> Tensor:
        return self.names if self.tokens is None else self.tokens

    def pick(self, scored: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.empty(self.names.shape, device=scored.device)
        block = power_of_two(self.count)
        _pick[(self.rows,)](
            scored,
            self.tops,
            self.totals,
            self.mapped,
            values,
            self.names,
            self.width,
            self.count,
            scored.stride(0),
            NAMED=self.tokens is not None,
            PACKED=scored.dtype == torch.bfloat16 and self.width <= PACKABLE,
            SIZE=self.size,
            K=self.k,
            RANKS=power_of_two(self.k),
            BLOCK=block,
            num_warps=1 if self.size == STRETCH else 4,
            **follows(scored),
        )
        return values, self.names


def top_children(
    logits: Tensor,
    k: int,
    positions: Tensor | None,
    seed: Tensor | None,
    temperature: Tensor | None,
    kappa: Tensor | None,
    tokens: Tensor | None,
    offset: int,
    noise: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, width = logits.shape
    assert logits.stride(1) == 1 and (noise is None or noise.is_contiguous())
    top = Top(rows, width, k, logits.device, tokens)
    scored = logits if positions is None else torch.empty((rows, width), device=logits.device)
    parts = max(1, 512 // top.size)
    _stretches[(rows, -(-top.count // parts))](
        logits,
        *((logits,) * 4 if positions is None else (positions, seed, temperature, kappa)),
        logits if noise is None else noise,
        top.mapped,
        scored,
        top.tops,
        top.totals,
        width,
        top.count,
        logits.stride(0),
        0 if noise is None else noise.stride(0),
        OFFSET=offset,
        DICE=positions is not None,
        KNOWN=0 if noise is None else len(noise),
        NAMED=tokens is not None,
        SIZE=top.size,
        PARTS=parts,
        num_warps=1,
        **leads(logits),
    )
    return top.pick(scored)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `top_words` takes these."""
    halves = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    columns = max(WORDS, size_of(len(weight)))
    whole = x.shape[1] % PART == 0 and len(weight) % columns == 0 and stages(columns, x) > 1
    return halves and whole and len(x) <= ROWS and x.stride(1) == 1 and weight.is_contiguous()


def stages(columns: int, like: Tensor) -> int:
    """As many as a program's memory holds, two bytes a number."""
    return min(STAGES, shared_memory(like.device) // (2 * PART * (columns + ROWS)))


def top_words(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    k: int,
    positions: Tensor | None,
    temperature: Tensor | None,
    kappa: Tensor | None,
    tokens: Tensor | None,
    offset: int,
    noise: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Without noise, or with one that is known."""
    rows, width = len(x), len(weight)
    assert (positions is None) == (noise is None) and (noise is None or noise.is_contiguous())
    top = Top(rows, width, k, x.device, tokens)
    scored = x.new_empty(rows, width, dtype=x.dtype if noise is None else torch.float32)
    columns = max(WORDS, top.size)
    _multiplied[(width // columns,)](
        x,
        weight,
        weight if bias is None else bias,
        *((x,) * 4 if noise is None else (positions, temperature, kappa, noise)),
        top.mapped,
        scored,
        top.tops,
        top.totals,
        rows,
        width,
        x.stride(0),
        0 if noise is None else noise.stride(0),
        BIAS=bias is not None,
        OFFSET=offset,
        KNOWN=0 if noise is None else len(noise),
        NAMED=tokens is not None,
        K=x.shape[1],
        SIZE=top.size,
        N=columns,
        M=ROWS,
        BLOCK_K=PART,
        num_warps=4,
        num_stages=stages(columns, x),
        **follows(x),
    )
    return top.pick(scored)
