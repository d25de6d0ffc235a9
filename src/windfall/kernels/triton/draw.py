"""Argmax over the vocabulary in two kernels: the best of each block of columns, then the best of these."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, pdl_trigger, power_of_two
from windfall.kernels.triton.noise import QUICK_ERROR, gumbel, noise_key, quick_gumbel
from windfall.kernels.triton.pdl import pdl_wait

BLOCK = 1024  # columns per program


@triton.jit
def _with_noise(scores, key, column):
    """The scores with exact noise, or only the highest of them and -inf.

    Quick noise finds the highest one, unless another is too close to it.
    """
    rough = scores + quick_gumbel(key, column)
    near = rough >= tl.max(rough, 0) - QUICK_ERROR
    if tl.sum(near.to(tl.int32), 0) > 1:
        added = gumbel(key, column)
    else:
        only = tl.max(tl.where(near, column, -1), 0)
        added = tl.where(near, gumbel(key, only), float("-inf"))
    return scores + added


@triton.jit
def _best(
    logits,
    positions,
    seed_at,
    temperature_at,
    noise,
    owners,
    cutoffs,
    values,
    columns,
    width,
    logits_row,
    noise_row,
    OFFSET: tl.constexpr,
    GREEDY: tl.constexpr,
    NOISE_ROWS: tl.constexpr,
    OWNED: tl.constexpr,
    CUT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, block of columns)."""
    pdl_wait(PDL)
    row = tl.program_id(0)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    scores = tl.load(logits + row.to(tl.int64) * logits_row + column, mask=inside, other=float("-inf")).to(tl.float32)
    if not GREEDY:
        if OWNED:
            owner = tl.load(owners + row)
            seed_at += owner
            temperature_at += owner
        temperature = tl.load(temperature_at)
        noisy = temperature != 0
        if CUT:
            scores = tl.where(scores >= tl.load(cutoffs + row), scores, float("-inf"))
            noisy = noisy & (tl.max(scores, 0) > float("-inf"))  # in most blocks, no token is left
        if noisy:
            position = tl.load(positions + row) + OFFSET
            scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
            if NOISE_ROWS > 0:
                scores += tl.load(noise + position % NOISE_ROWS * noise_row + column, mask=inside, other=0.0)
            else:
                scores = _with_noise(scores, noise_key(tl.load(seed_at), position), column)
    value, place = tl.max(scores, 0, return_indices=True)
    tl.store(values + row * tl.num_programs(1) + block, value)
    tl.store(columns + row * tl.num_programs(1) + block, block * BLOCK + place)


@triton.jit
def _reduce(values, columns, out, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row)."""
    pdl_wait(PDL)
    row = tl.program_id(0)
    block = tl.arange(0, BLOCK)
    found = tl.load(values + row * blocks + block, mask=block < blocks, other=float("-inf"))
    _, place = tl.max(found, 0, return_indices=True)
    tl.store(out + row, tl.load(columns + row * blocks + place).to(tl.int64))


def draw(
    logits: Tensor,
    positions: Tensor,
    seed: Tensor,
    temperature: Tensor,
    greedy: bool,
    offset: int,
    noise: Tensor | None,
    owners: Tensor | None = None,
    cutoff: Tensor | None = None,
) -> Tensor:
    (rows, width), device = logits.shape, logits.device
    assert logits.stride(1) == 1 and positions.is_contiguous()
    assert noise is None or (noise.is_contiguous() and noise.shape[1] >= width)
    assert owners is None or all(x.is_contiguous() for x in (owners, seed, temperature))
    assert cutoff is None or cutoff.is_contiguous()
    blocks = -(-width // BLOCK)
    values = torch.empty((rows, blocks), device=device)
    columns = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.long, device=device)
    _best[(rows, blocks)](
        logits,
        positions,
        seed,
        temperature,
        temperature if noise is None else noise,
        positions if owners is None else owners,
        temperature if cutoff is None else cutoff,
        values,
        columns,
        width,
        logits.stride(0),
        0 if noise is None else noise.stride(0),
        OFFSET=offset,
        GREEDY=greedy,
        NOISE_ROWS=0 if noise is None else len(noise),
        OWNED=owners is not None,
        CUT=cutoff is not None,
        BLOCK=BLOCK,
        num_warps=4,
        **pdl_trigger(logits),
    )
    _reduce[(rows,)](values, columns, out, blocks, BLOCK=power_of_two(blocks), num_warps=1, **pdl_launch(logits))
    return out


@triton.jit
def _update_noise(
    noise, length_at, entered_at, seed_at, width, COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program (offset from the first position, block of columns)."""
    pdl_wait(PDL)
    offset = tl.program_id(0)
    if offset >= COUNT - tl.load(entered_at):
        position = tl.load(length_at) + offset
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        made = gumbel(noise_key(tl.load(seed_at), position), column)
        tl.store(noise + position % COUNT * width + column, made, mask=column < width)


def update_noise(noise: Tensor, length: Tensor, entered: Tensor, seed: Tensor) -> None:
    count, width = noise.shape
    assert noise.is_contiguous()
    block = BLOCK // 2
    grid = (count, -(-width // block))
    _update_noise[grid](
        noise, length, entered, seed, width, COUNT=count, BLOCK=block, num_warps=4, **pdl_trigger(noise)
    )
