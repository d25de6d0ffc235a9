"""Top k in two kernels.

The first computes the maximum of each block of columns and the block's part of the softmax normaliser. The second
searches the k blocks with the highest maxima of each row, since no other block can hold one of the k best columns. It
takes them one by one, or, if k is large, finds the k-th best value bit by bit.

The first kernel reads logits, or computes them and stores them for the second. When it computes them, it adds no noise
or precomputed noise: computing noise needs more programs than the product has.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, pdl_trigger, power_of_two, shared_memory
from windfall.kernels.triton.grow import NONE, best, order_of, value_of
from windfall.kernels.triton.noise import noise_key, quick_gumbel
from windfall.kernels.triton.pdl import pdl_wait

MIN_COLUMNS = 64  # per block
MAX_BLOCKS = 1024  # per row; longer rows have larger blocks
MAX_PACKED_COLUMNS = 2**16  # columns whose index has 16 bits
ROWS = 16  # of a product
BLOCK_K = 64  # elements of a row per iteration of a product
MIN_PRODUCT_COLUMNS = 128  # per program
MAX_STAGES = 6  # of a product's software pipeline
MAX_ONE_BY_ONE = 32  # children that are taken one by one

Out = tuple[Tensor, Tensor]


@triton.jit
def _with_noise(scores, noise, temperature_at, kappa_at):
    """(scores / temperature + noise) / kappa"""
    zeros = tl.zeros_like(scores)
    return tl.div_rn(tl.div_rn(scores, zeros + tl.load(temperature_at)) + noise, zeros + tl.load(kappa_at))


@triton.jit
def _noise_of_row(
    position,
    seed_at,
    noise,
    tokens,
    column,
    inside,
    noise_row,
    NOISE_ROWS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """The noise of these columns at this position."""
    names = column.to(tl.int64)
    if MAPPED:
        names = tl.load(tokens + column, mask=inside, other=0)
    if NOISE_ROWS > 0:
        added = tl.load(noise + position % NOISE_ROWS * noise_row + names, mask=inside, other=0.0)
    else:
        added = quick_gumbel(noise_key(tl.load(seed_at), position), names)
    return added


@triton.jit
def _block_maxima(
    logits,
    positions,
    seed_at,
    temperature_at,
    kappa_at,
    noise,
    owners,
    cutoffs,
    tokens,
    scored,
    tops,
    totals,
    width,
    count,
    logits_row,
    noise_row,
    OFFSET: tl.constexpr,
    SAMPLED: tl.constexpr,
    NOISE_ROWS: tl.constexpr,
    MAPPED: tl.constexpr,
    OWNED: tl.constexpr,
    CUT: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, PARTS of its `count` blocks)."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    column = part[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = column < width
    scores = tl.load(logits + row * logits_row + column, mask=inside, other=float("-inf")).to(tl.float32)
    if SAMPLED:
        position = tl.load(positions + row) + OFFSET
        if OWNED:
            owner = tl.load(owners + row)
            seed_at += owner
            temperature_at += owner
            kappa_at += owner
        if OWNED or CUT:
            noisy = tl.load(temperature_at) != 0
            if CUT:
                scores = tl.where(scores >= tl.load(cutoffs + row), scores, float("-inf"))
                noisy = noisy & (tl.max(tl.max(scores, 1), 0) > float("-inf"))  # in most blocks, no token is left
            if noisy:
                added = _noise_of_row(position, seed_at, noise, tokens, column, inside, noise_row, NOISE_ROWS, MAPPED)
                scores = _with_noise(scores, added, temperature_at, kappa_at)
        else:
            added = _noise_of_row(position, seed_at, noise, tokens, column, inside, noise_row, NOISE_ROWS, MAPPED)
            scores = _with_noise(scores, added, temperature_at, kappa_at)
        tl.store(scored + row * width + column, scores, mask=inside)
    top = tl.max(scores, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + row * count + part, top, mask=part < count)
    tl.store(totals + row * count + part, tl.sum(tl.exp(scores - base[:, None]), 1), mask=part < count)


@triton.jit(do_not_specialize=["rows"])
def _multiply_vocabulary(
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
    NOISE_ROWS: tl.constexpr,
    MAPPED: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (N columns): compute the logits of all rows, rounded as torch rounds them, then do as `_block_maxima`."""
    pdl_wait(PDL)
    column = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.arange(0, M)
    live = row < rows
    sums = tl.zeros([N, M], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        weights = tl.load(weight + column[:, None].to(tl.int64) * K + k[None, :])
        states = tl.load(x + row[None, :] * x_row + k[:, None], mask=live[None, :], other=0.0)
        sums = tl.dot(weights, states, sums)
    if BIAS:
        sums += tl.load(bias + column).to(tl.float32)[:, None]
    scores = sums.to(x.dtype.element_ty).to(tl.float32)
    if NOISE_ROWS > 0:
        names = column.to(tl.int64)
        if MAPPED:
            names = tl.load(tokens + column)
        position = tl.load(positions + row, mask=live, other=0) + OFFSET
        place = (position % NOISE_ROWS * noise_row)[None, :] + names[:, None]
        scores = _with_noise(scores, tl.load(noise + place, mask=live[None, :], other=0.0), temperature_at, kappa_at)
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
    """`best`. PACKED: one integer holds a 16-bit index and the upper half of an order, which suffices for bf16, so that
    each iteration needs only one reduction."""
    if PACKED:
        rank = tl.arange(0, RANKS)
        found = tl.full([RANKS], NONE, tl.int32)
        order = tl.where(order == NONE, NONE, (order & -65536) | (65535 - name))
        for i in range(COUNT):
            first = tl.max(order, 0)
            found = tl.where(rank == i, first, found)
            order = tl.where(order == first, NONE, order)
        names = 65535 - (found & 65535)
        orders = tl.where(found == NONE, NONE, (found & -65536) | ((found >> 31) & 65535))
    else:
        names, orders = best(order, name, COUNT, RANKS)
    return names, orders


@triton.jit
def _normaliser(top, total):
    """The highest score of a row, and the logarithm of its softmax normaliser after this is subtracted."""
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    return base, tl.log(tl.sum(total * tl.exp(top - base), 0))


@triton.jit
def _pick_children(
    scored,
    tops,
    totals,
    tokens,
    values,
    names,
    width,
    count,
    scored_row,
    MAPPED: tl.constexpr,
    PACKED: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): find the k best columns in the k best blocks."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    made = block < count
    top = tl.load(tops + row * count + block, mask=made, other=float("-inf"))
    total = tl.load(totals + row * count + block, mask=made, other=0.0)
    where, reached = _highest(tl.where(made, order_of(top), NONE), block, K, RANKS, PACKED)
    column = where[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (reached > NONE)[:, None] & (column < width)
    scores = tl.load(scored + row * scored_row + column, mask=inside, other=0.0).to(tl.float32)
    base, normaliser = _normaliser(top, total)
    order = tl.reshape(tl.where(inside, order_of(scores), NONE), (RANKS * SIZE,))
    found, orders = _highest(order, tl.reshape(column, (RANKS * SIZE,)), K, RANKS, PACKED)
    rank = tl.arange(0, RANKS)
    name = found.to(tl.int64)
    if MAPPED:
        name = tl.load(tokens + found, mask=rank < K, other=0)
    tl.store(values + row * K + rank, value_of(orders) - base - normaliser, mask=rank < K)
    tl.store(names + row * K + rank, name, mask=rank < K)


@triton.jit
def _are_highest(order, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Which of these orders are the COUNT highest. Orders have BITS bits; the lowest one stands for no order. Of equal
    orders, the earlier ones are taken."""
    lowest: tl.constexpr = -(1 << (BITS - 1))
    bound = tl.where(tl.sum((order >= 0).to(tl.int32), 0) >= COUNT, 0, lowest)  # becomes the COUNT-th highest order
    for i in range(1, BITS):
        higher = bound + (1 << (BITS - 1 - i))
        bound = tl.where(tl.sum((order >= higher).to(tl.int32), 0) >= COUNT, higher, bound)
    above = order > bound
    tied = (order == bound) & (order > lowest)
    wanted = COUNT - tl.sum(above.to(tl.int32), 0)
    return above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= wanted))


@triton.jit
def _pick_many(
    scored,
    tops,
    totals,
    tokens,
    values,
    names,
    kept,  # [rows, 3, RANKS]: the chosen blocks; the columns found, and their orders
    width,
    count,
    scored_row,
    MAPPED: tl.constexpr,
    PACKED: tl.constexpr,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row): as `_pick_children`, for many children. PACKED: the upper half of an order suffices."""
    BITS: tl.constexpr = 16 if PACKED else 32
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    kept += row * 3 * RANKS
    rank, block = tl.arange(0, RANKS), tl.arange(0, BLOCK)
    made = block < count
    top = tl.load(tops + row * count + block, mask=made, other=float("-inf"))
    total = tl.load(totals + row * count + block, mask=made, other=0.0)
    base, normaliser = _normaliser(top, total)
    chosen = _are_highest(tl.where(made, order_of(top), NONE) >> (32 - BITS), K, BITS).to(tl.int32)
    tl.store(kept + tl.cumsum(chosen, 0) - 1, block, mask=chosen != 0)
    tl.debug_barrier()  # all chosen blocks are written
    known = rank < tl.sum(chosen, 0)
    column = tl.load(kept + rank, mask=known, other=0)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = known[:, None] & (column < width)
    scores = tl.load(scored + row * scored_row + column, mask=inside, other=0.0).to(tl.float32)
    order = tl.reshape(tl.where(inside, order_of(scores), NONE), (RANKS * SIZE,))
    chosen = _are_highest(order >> (32 - BITS), K, BITS).to(tl.int32)
    place = tl.cumsum(chosen, 0) - 1
    tl.store(kept + RANKS + place, tl.reshape(column, (RANKS * SIZE,)), mask=chosen != 0)
    tl.store(kept + 2 * RANKS + place, order, mask=chosen != 0)
    tl.debug_barrier()
    known = rank < K
    column = tl.load(kept + RANKS + rank, mask=known, other=0)
    order = tl.load(kept + 2 * RANKS + rank, mask=known, other=NONE)
    one, other = order[:, None], order[None, :]
    ahead = (other > one) | ((other == one) & (rank[None, :] < rank[:, None]))  # columns ascend
    place = tl.sum(ahead.to(tl.int32), 1)
    name = column.to(tl.int64)
    if MAPPED:
        name = tl.load(tokens + column, mask=known, other=0)
    tl.store(values + row * K + place, value_of(order) - base - normaliser, mask=known)
    tl.store(names + row * K + place, name, mask=known)


def block_size(width: int) -> int:
    """Columns per block."""
    return max(MIN_COLUMNS, power_of_two(-(-width // MAX_BLOCKS)))


class TopBuffers:
    """Buffers that both kernels share, for scores of [rows, width]: maximum and partial normaliser of each block."""

    def __init__(
        self, rows: int, width: int, k: int, device: torch.device, tokens: Tensor | None, out: Out | None = None
    ):
        self.rows, self.width, self.k, self.tokens = rows, width, k, tokens
        self.size = block_size(width)
        self.count = -(-width // self.size)
        self.tops, self.totals = torch.empty((2, rows, self.count), device=device)
        self.values, self.names = out or (
            torch.empty((rows, k), device=device),
            torch.empty((rows, k), dtype=torch.long, device=device),
        )
        assert self.values.shape == self.names.shape == (rows, k)
        assert self.values.is_contiguous() and self.names.is_contiguous()

    @property
    def mapped(self) -> Tensor:
        """The tokens of the columns; any tensor, if columns are tokens."""
        return self.names if self.tokens is None else self.tokens

    def pick(self, scored: Tensor) -> tuple[Tensor, Tensor]:
        """Run the second kernel → log-probabilities and tokens, both [rows, k]."""
        given = (scored, self.tops, self.totals, self.mapped, self.values, self.names)
        sizes = (self.width, self.count, scored.stride(0))
        ranks, half = power_of_two(self.k), scored.dtype == torch.bfloat16
        shapes = {"SIZE": self.size, "K": self.k, "RANKS": ranks, "BLOCK": power_of_two(self.count)}
        fixed = {"MAPPED": self.tokens is not None, **shapes, **pdl_launch(scored)}
        if self.k > MAX_ONE_BY_ONE:
            kept = torch.empty((self.rows, 3, ranks), dtype=torch.int32, device=scored.device)
            _pick_many[(self.rows,)](*given, kept, *sizes, PACKED=half, num_warps=8, **fixed)
        else:
            packed = half and self.width <= MAX_PACKED_COLUMNS
            warps = 1 if self.size == MIN_COLUMNS else 4
            _pick_children[(self.rows,)](*given, *sizes, PACKED=packed, num_warps=warps, **fixed)
        return self.values, self.names


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
    owners: Tensor | None = None,
    cutoff: Tensor | None = None,
    out: Out | None = None,
) -> tuple[Tensor, Tensor]:
    rows, width = logits.shape
    assert logits.stride(1) == 1 and (noise is None or noise.is_contiguous())
    assert all(x is None or x.is_contiguous() for x in (owners, seed, temperature, kappa, cutoff))
    top = TopBuffers(rows, width, k, logits.device, tokens, out)
    scored = logits if positions is None else torch.empty((rows, width), device=logits.device)
    parts = max(1, 512 // top.size)
    _block_maxima[(rows, -(-top.count // parts))](
        logits,
        *((logits,) * 4 if positions is None else (positions, seed, temperature, kappa)),
        logits if noise is None else noise,
        top.names if owners is None else owners,
        logits if cutoff is None else cutoff,
        top.mapped,
        scored,
        top.tops,
        top.totals,
        width,
        top.count,
        logits.stride(0),
        0 if noise is None else noise.stride(0),
        OFFSET=offset,
        SAMPLED=positions is not None,
        NOISE_ROWS=0 if noise is None else len(noise),
        MAPPED=tokens is not None,
        OWNED=owners is not None,
        CUT=cutoff is not None,
        SIZE=top.size,
        PARTS=parts,
        num_warps=1,
        **pdl_trigger(logits),
    )
    return top.pick(scored)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `top_children_of_product` supports these operands."""
    half = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    columns = max(MIN_PRODUCT_COLUMNS, block_size(len(weight)))
    divisible = x.shape[1] % BLOCK_K == 0 and len(weight) % columns == 0 and stages(columns, x) > 1
    return half and divisible and len(x) <= ROWS and x.stride(1) == 1 and weight.is_contiguous()


def stages(columns: int, like: Tensor) -> int:
    """Pipeline stages that fit into shared memory, with two bytes per element."""
    return min(MAX_STAGES, shared_memory(like.device) // (2 * BLOCK_K * (columns + ROWS)))


def top_children_of_product(
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
    out: Out | None = None,
) -> tuple[Tensor, Tensor]:
    """Top k of a product, without noise or with precomputed noise."""
    rows, width = len(x), len(weight)
    assert (positions is None) == (noise is None) and (noise is None or noise.is_contiguous())
    top = TopBuffers(rows, width, k, x.device, tokens, out)
    scored = x.new_empty(rows, width, dtype=x.dtype if noise is None else torch.float32)
    columns = max(MIN_PRODUCT_COLUMNS, top.size)
    _multiply_vocabulary[(width // columns,)](
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
        NOISE_ROWS=0 if noise is None else len(noise),
        MAPPED=tokens is not None,
        K=x.shape[1],
        SIZE=top.size,
        N=columns,
        M=ROWS,
        BLOCK_K=BLOCK_K,
        num_warps=4,
        num_stages=stages(columns, x),
        **pdl_launch(x),
    )
    return top.pick(scored)
