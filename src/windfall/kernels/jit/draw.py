"""Two kernels: the best of each stretch of the vocabulary, then the best of those."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, leads, power_of_two
from windfall.kernels.jit.chain import begin
from windfall.kernels.jit.noise import gumbel, noise_key

BLOCK = 1024  # columns of one program


@triton.jit
def _best(
    logits,
    positions,
    seed_at,
    temperature_at,
    values,
    columns,
    width,
    logits_row,
    OFFSET: tl.constexpr,
    GREEDY: tl.constexpr,
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
            key = noise_key(tl.load(seed_at), tl.load(positions + row) + OFFSET)
            scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature) + gumbel(key, column)
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


def draw(logits: Tensor, positions: Tensor, seed: Tensor, temperature: Tensor, greedy: bool, offset: int = 0) -> Tensor:
    (rows, width), device = logits.shape, logits.device
    assert logits.stride(1) == 1 and positions.is_contiguous()
    stretches = -(-width // BLOCK)
    values = torch.empty((rows, stretches), device=device)
    columns = torch.empty((rows, stretches), dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.long, device=device)
    _best[(rows, stretches)](
        logits,
        positions,
        seed,
        temperature,
        values,
        columns,
        width,
        logits.stride(0),
        OFFSET=offset,
        GREEDY=greedy,
        BLOCK=BLOCK,
        num_warps=4,
        **leads(logits),
    )
    _reduce[(rows,)](values, columns, out, stretches, BLOCK=power_of_two(stretches), num_warps=1, **follows(logits))
    return out
