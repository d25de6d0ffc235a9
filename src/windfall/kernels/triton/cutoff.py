"""Top-k, top-p and min-p without sorting.

A logit has an unsigned order: an integer of as many bits as the logit that sorts as the logit does. Each launch finds
four bits of the cutoff's order. Its programs count the tokens of each row (for top-k) or add their weights (for top-p)
above 16 bars. The sums are integers, so they do not depend on the number of programs. The last program of a row to
finish moves the bars.

A row with top-k searches for its order first, then for that of top-p; the first launch also finds the highest logit.
Launches that a row does not need end at once.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.core.cutoff import SCALE
from windfall.kernels.backend import pdl_launch, pdl_trigger
from windfall.kernels.triton.pdl import pdl_wait

DIGIT_BITS = 4  # of an order, that one launch finds
BARS = 16  # 2^DIGIT_BITS
BLOCK = 512  # columns that a program reads at a time
PROGRAMS = 4096  # of a launch, if the rows are long enough
NOTES = 20  # numbers that launches keep of each row: 16 sums, then these
ARRIVED = tl.constexpr(16)  # programs that have finished
HIGHEST = tl.constexpr(17)  # order of the highest logit
FOUND = tl.constexpr(18)  # bits of the order that are found
WANTED = tl.constexpr(19)  # sum of weights that the tokens above the cutoff of top-p must reach
WEIGHT = tl.constexpr(SCALE)  # of the likeliest token
LOWEST = tl.constexpr(-23.0)  # nats below the likeliest token at which the weight is 0: exp(-23) * WEIGHT is below 1
SLACK = tl.constexpr(1.01)  # for rounding, where blocks of weight 0 are skipped


@triton.jit
def _order(values, BITS: tl.constexpr):
    """Unsigned orders of these logits, uint32."""
    if BITS == 16:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32)
        bits = tl.where(bits == -32768, 0, bits)  # -0.0 becomes 0.0
        order = ((bits ^ ((bits >> 31) & 0x7FFF)) + 32768).to(tl.uint32)
    else:
        bits = (values + 0.0).to(tl.int32, bitcast=True)
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return order


@triton.jit
def _logit(order, like, BITS: tl.constexpr):
    """The logit of an unsigned order (int64) in fp32; `like` points to logits."""
    if BITS == 16:
        bits = (order - 32768).to(tl.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFF)
        value = bits.to(tl.int16).to(like.dtype.element_ty, bitcast=True).to(tl.float32)
    else:
        bits = (order - 2147483648).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _weights(logits, highest, temperature):
    """exp((logits - highest) / temperature) * WEIGHT, rounded down, int64."""
    wide = logits.to(tl.float64)
    top = highest.to(tl.float64)
    below = tl.where(wide == top, 0.0, wide - top) * (1.0 / temperature.to(tl.float64))  # infinite ones have no NaN
    return tl.where(below > LOWEST, tl.exp(below) * WEIGHT, 0.0).to(tl.int64)


@triton.jit(do_not_specialize=["launch", "span"])
def _find_digit(
    logits,
    temperature_at,
    top_k_at,
    top_p_at,
    min_p_at,
    owners,
    notes,
    out,
    launch,
    width,
    span,
    logits_row,
    OWNED: tl.constexpr,
    BITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BARS: tl.constexpr,
    NOTES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, `span` of its columns). This is the launch of this number; the first is 0."""
    pdl_wait(PDL)
    DIGITS: tl.constexpr = BITS // DIGIT_BITS
    row = tl.program_id(0)
    owner = row * 0
    if OWNED:
        owner = tl.load(owners + row)
    temperature = tl.load(temperature_at + owner)
    top_k = tl.load(top_k_at + owner)
    top_p = tl.load(top_p_at + owner)
    min_p = tl.load(min_p_at + owner)
    drawn = temperature != 0
    by_count = drawn & (top_k > 0) & (top_k < width)
    by_weight = drawn & (top_p < 1)
    by_ratio = drawn & (min_p > 0)
    first = tl.where(by_count, DIGITS, 1)  # launch of the first digit of top-p
    last = tl.where(by_weight, first + DIGITS, tl.where(by_count, DIGITS, 1)) - 1
    counts = by_count & (launch < DIGITS)
    adds = by_weight & (launch >= first)
    working = (by_count | by_weight | by_ratio) & (launch <= last)
    if working:
        notes += row.to(tl.int64) * NOTES
        digit = tl.where(counts, launch, launch - first)
        shift = (BITS - DIGIT_BITS * (digit + 1)).to(tl.int64)
        known = tl.load(notes + FOUND)
        begins = adds & (launch == first)  # until here, the order of top-k is known
        base = tl.where(begins, 0, known)
        highest = _logit(tl.load(notes + HIGHEST), logits, BITS)
        logits += row.to(tl.int64) * logits_row
        bar = tl.arange(0, BARS)
        sums = tl.zeros([BARS], tl.int64)
        start = tl.program_id(1) * span
        end = tl.minimum(start + span, width)
        for at in range(start, end, BLOCK):
            column = at + tl.arange(0, BLOCK)
            inside = column < end
            values = tl.load(logits + column, mask=inside, other=float("-inf"))
            order = tl.where(inside, _order(values, BITS), 0)
            top = tl.max(order, 0)
            if launch == 0:
                tl.atomic_max(notes + HIGHEST, top.to(tl.int64), sem="relaxed")
            if counts:
                for i in tl.static_range(1, BARS):
                    above = order >= (base + (i << shift)).to(tl.uint32)
                    sums += tl.where(bar == i, tl.sum(above.to(tl.int32), 0), 0)
            if adds:
                best = _logit(top.to(tl.int64), logits, BITS)
                weighs = (best == highest) | (best - highest > LOWEST * temperature * SLACK)
                if weighs & (top >= known.to(tl.uint32)):  # most blocks have no such token
                    weight = _weights(values.to(tl.float32), highest, temperature)
                    weight = tl.where(order >= known.to(tl.uint32), weight, 0)
                    sums += tl.where(bar == 0, tl.sum(weight, 0), 0)
                    for i in tl.static_range(1, BARS):
                        above = order >= (base + (i << shift)).to(tl.uint32)
                        sums += tl.where(bar == i, tl.sum(tl.where(above, weight, 0), 0), 0)
        if counts | adds:
            tl.atomic_add(notes + bar, sums, sem="relaxed")
        tl.debug_barrier()  # all threads have added before the next atomic releases their sums
        before = tl.atomic_add(notes + ARRIVED, 1, sem="acq_rel")
        tl.debug_barrier()
        if before == tl.num_programs(1) - 1:
            sums = tl.load(notes + bar)
            top = tl.load(notes + HIGHEST)
            total = tl.sum(tl.where(bar == 0, sums, 0), 0).to(tl.float64)
            wanted = tl.load(notes + WANTED)
            share = tl.maximum(tl.ceil(top_p.to(tl.float64) * total), 1.0).to(tl.int64)
            wanted = tl.where(begins, share, tl.where(counts, top_k, wanted))
            reached = tl.sum(((bar > 0) & (sums >= wanted)).to(tl.int64), 0)
            found = tl.where(counts | adds, base + (reached << shift), base)
            tl.debug_barrier()  # every thread has read what is overwritten
            tl.store(notes + bar, tl.zeros([BARS], tl.int64))
            tl.store(notes + ARRIVED, found * 0)
            tl.store(notes + FOUND, found)
            tl.store(notes + WANTED, wanted)
            if launch == last:
                lowest = tl.where(by_count | by_weight, _logit(found, logits, BITS), float("-inf"))
                ratio = tl.where(by_ratio, min_p, 1.0).to(tl.float64)
                peak = _logit(top, logits, BITS).to(tl.float64)
                likely = (peak + temperature.to(tl.float64) * tl.log(ratio)).to(tl.float32)
                likely = tl.where(by_ratio, likely, float("-inf"))
                tl.store(out + row, tl.maximum(lowest, likely))
    elif (launch == 0) & (tl.program_id(1) == 0):
        tl.store(out + row, float("-inf"))


def launches(logits: Tensor) -> int:
    """The launches of `cutoffs`."""
    return 2 * logits.element_size() * 8 // DIGIT_BITS


def cutoffs(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    owners: Tensor | None = None,
    splits: int | None = None,  # programs of each row; chosen if None
) -> Tensor:
    (rows, width), device = logits.shape, logits.device
    settings = temperature, top_k, top_p, min_p
    assert logits.stride(1) == 1 and all(x.is_contiguous() for x in settings)
    assert owners is None or owners.is_contiguous()
    blocks = -(-width // BLOCK)
    blocks_each = -(-blocks // min(splits or -(-PROGRAMS // rows), blocks))
    notes = torch.zeros((rows, NOTES), dtype=torch.long, device=device)
    out = torch.empty(rows, device=device)
    for launch in range(launches(logits)):
        _find_digit[(rows, -(-blocks // blocks_each))](
            logits,
            *settings,
            top_k if owners is None else owners,
            notes,
            out,
            launch,
            width,
            blocks_each * BLOCK,
            logits.stride(0),
            OWNED=owners is not None,
            BITS=logits.element_size() * 8,
            DIGIT_BITS=DIGIT_BITS,
            BARS=BARS,
            NOTES=NOTES,
            BLOCK=BLOCK,
            num_warps=1,
            enable_fp_fusion=False,
            **(pdl_launch(logits) if launch else pdl_trigger(logits)),
        )
    return out
