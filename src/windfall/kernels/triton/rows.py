"""One program for all rows, or one a row where they bring something."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, leads, power_of_two
from windfall.kernels.triton.chain import begin


@triton.jit
def _stand(length_at, depth, positions, slots, rows, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    begin(CHAINED)
    row = tl.arange(0, BLOCK)
    length = tl.load(length_at)
    tl.store(positions + row, length + tl.load(depth + row, mask=row < rows, other=0), mask=row < rows)
    tl.store(slots + row, length + row, mask=row < rows)


def stand(length: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    rows = len(depth)
    assert depth.is_contiguous()
    positions, slots = torch.empty_like(depth), torch.empty_like(depth)
    block = power_of_two(rows)
    _stand[(1,)](length, depth, positions, slots, rows, BLOCK=block, num_warps=_warps(block), **follows(depth))
    return positions, slots


@triton.jit
def _take_in(length_at, waiting_at, slots, last, before, rows, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    begin(CHAINED)
    row = tl.arange(0, BLOCK)
    length = tl.load(length_at)
    waiting = tl.load(waiting_at)
    tl.store(slots + row, length + row, mask=row < rows)
    tl.store(last, waiting - 1)
    tl.store(before, length)
    tl.debug_barrier()  # all have read it
    tl.store(length_at, length + waiting)


def take_in(length: Tensor, waiting: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = torch.empty(rows, dtype=torch.long, device=length.device)
    last, before = torch.empty_like(length), torch.empty_like(length)
    block = power_of_two(rows)
    _take_in[(1,)](length, waiting, slots, last, before, rows, BLOCK=block, num_warps=_warps(block), **leads(length))
    return slots, last, before


@triton.jit
def _embed(
    tokens,
    embedding,
    positions,
    angles,
    words,
    turns,
    width,
    across,
    most,
    embedding_row,
    angles_row,
    BLOCK: tl.constexpr,
    BLOCK_A: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (row)."""
    begin(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    position = tl.minimum(tl.load(positions + row), most)
    column = tl.arange(0, BLOCK)
    angle = tl.arange(0, BLOCK_A)
    word = tl.load(embedding + token * embedding_row + column, mask=column < width)
    turn = tl.load(angles + position * angles_row + angle, mask=angle < across)
    tl.store(words + row * width + column, word, mask=column < width)
    tl.store(turns + row * across + angle, turn, mask=angle < across)


def embed(tokens: Tensor, embedding: Tensor, positions: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    rows, width, across = len(tokens), embedding.shape[1], angles.shape[1]
    assert tokens.is_contiguous() and positions.is_contiguous()
    words, turns = embedding.new_empty(rows, width), angles.new_empty(rows, across)
    block = power_of_two(width)
    _embed[(rows,)](
        tokens,
        embedding,
        positions,
        angles,
        words,
        turns,
        width,
        across,
        len(angles) - 1,
        embedding.stride(0),
        angles.stride(0),
        BLOCK=block,
        BLOCK_A=power_of_two(across),
        num_warps=_warps(block),
        **follows(embedding),
    )
    return words, turns


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))
