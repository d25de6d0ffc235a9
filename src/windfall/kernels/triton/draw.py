"""Two kernels: the best of each stretch of the vocabulary, then the best of those."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, leads, power_of_two
from windfall.kernels.triton.chain import begin
from windfall.kernels.triton.noise import gumbel, noise_key

BLOCK = 1024  # columns of one program


@triton.jit
def _best(
    logits,
    positions,
    seed_at,
    temperature_at,
    noise,
    values,
    columns,
    width,
    logits_row,
    noise_row,
    OFFSET: tl.constexpr,
    GREEDY: tl.constexpr,
    KNOWN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (row, stretch)."""
    begin(CHAINED)
    row = tl.program_id(0)
    stretch = tl.program_id(1)
    column = stretch * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    scores = tl.load(logits + row.to(tl.int64) * logits_row + column, mask=inside, other=float("-inf")).to(tl.float32)
    if not GREEDY:
        temperature = tl.load(temperature_at)
        if temperature != 0:
            position = tl.load(positions + row) + OFFSET
            if KNOWN > 0:
                added = tl.load(noise + position % KNOWN * noise_row + column, mask=inside, other=0.0)
            else:
                added = gumbel(noise_key(tl.load(seed_at), position), column)
            scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature) + added
    value, place = tl.max(scores, 0, return_indices=True)
    tl.store(values + row * tl.num_programs(1) + stretch, value)
    tl.store(columns + row * tl.num_programs(1) + stretch, stretch * BLOCK + place)


@triton.jit
def _reduce(values, columns, out, stretches, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Program (row)."""
    begin(CHAINED)
    row = tl.program_id(0)
    stretch = tl.arange(0, BLOCK)
    found = tl.load(values + row * stretches + stretch, mask=stretch < stretches, other=float("-inf"))
    _, place = tl.max(found, 0, return_indices=True)
    tl.store(out + row, tl.load(columns + row * stretches + place).to(tl.int64))


def draw(
    logits: Tensor,
    positions: Tensor,
    seed: Tensor,
    temperature: Tensor,
    greedy: bool,
    offset: int,
    noise: Tensor | None,
) -> Tensor:
    (rows, width), device = logits.shape, logits.device
    assert logits.stride(1) == 1 and positions.is_contiguous()
    assert noise is None or (noise.is_contiguous() and noise.shape[1] >= width)
    stretches = -(-width // BLOCK)
    values = torch.empty((rows, stretches), device=device)
    columns = torch.empty((rows, stretches), dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.long, device=device)
    _best[(rows, stretches)](
        logits,
        positions,
        seed,
        temperature,
        temperature if noise is None else noise,
        values,
        columns,
        width,
        logits.stride(0),
        0 if noise is None else noise.stride(0),
        OFFSET=offset,
        GREEDY=greedy,
        KNOWN=0 if noise is None else len(noise),
        BLOCK=BLOCK,
        num_warps=4,
        **leads(logits),
    )
    _reduce[(rows,)](values, columns, out, stretches, BLOCK=power_of_two(stretches), num_warps=1, **follows(logits))
    return out


@triton.jit
def _roll(
    noise, length_at, entered_at, seed_at, width, COUNT: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    """Program (one of the positions ahead, stretch)."""
    begin(CHAINED)
    ahead = tl.program_id(0)
    if ahead >= COUNT - tl.load(entered_at):
        position = tl.load(length_at) + ahead
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        made = gumbel(noise_key(tl.load(seed_at), position), column)
        tl.store(noise + position % COUNT * width + column, made, mask=column < width)


def roll(noise: Tensor, length: Tensor, entered: Tensor, seed: Tensor) -> None:
    count, width = noise.shape
    assert noise.is_contiguous()
    block = BLOCK // 2
    grid = (count, -(-width // block))
    _roll[grid](noise, length, entered, seed, width, COUNT=count, BLOCK=block, num_warps=4, **leads(noise))
