"""Inputs of a forward pass: one program for all rows, or one program per row for embeddings."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, pdl_trigger, power_of_two
from windfall.kernels.triton.pdl import pdl_wait


@triton.jit
def _place_rows(
    length_at, depth, count, mask, positions, slots, reach, lines, rows, mask_row,
    BLOCK: tl.constexpr, CHAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    pdl_wait(PDL)
    row = tl.program_id(0)
    length = tl.load(length_at)
    position = length + tl.load(depth + row)
    tl.store(positions + row, position)
    tl.store(slots + row, length + row)
    tl.store(reach + row, tl.where(row < tl.load(count), position + 1, 0))
    if not CHAIN:
        column = tl.arange(0, BLOCK)
        inside = column < rows
        seen = tl.load(mask + row * mask_row + column, mask=inside, other=0) != 0
        level = tl.load(depth + column, mask=inside, other=0)
        tl.store(lines + row * rows + level, (length + column).to(tl.int32), mask=inside & seen)


def place_rows(
    length: Tensor, depth: Tensor, count: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`kernels.rows.place_rows`; depths at which a row has no ancestor are not written."""
    rows = len(depth)
    assert depth.is_contiguous() and (mask is None or (mask.stride(1) == 1 and mask.shape == (rows, rows)))
    positions, slots, reach = (torch.empty_like(depth) for _ in range(3))
    lines = None if mask is None else torch.empty(rows, rows, dtype=torch.int32, device=depth.device)
    _place_rows[(rows,)](
        length,
        depth,
        count,
        depth if mask is None else mask.view(torch.uint8),
        positions,
        slots,
        reach,
        reach if lines is None else lines,
        rows,
        0 if mask is None else mask.stride(0),
        BLOCK=power_of_two(rows),
        CHAIN=mask is None,
        num_warps=1,
        **pdl_launch(depth),
    )
    return positions, slots, reach, lines


@triton.jit
def _append_rows(length_at, waiting_at, slots, last, before, rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program."""
    pdl_wait(PDL)
    row = tl.arange(0, BLOCK)
    length = tl.load(length_at)
    waiting = tl.load(waiting_at)
    tl.store(slots + row, length + row, mask=row < rows)
    tl.store(last, waiting - 1)
    tl.store(before, length)
    tl.debug_barrier()  # every thread has read the length
    tl.store(length_at, length + waiting)


def append_rows(length: Tensor, waiting: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    slots = torch.empty(rows, dtype=torch.long, device=length.device)
    last, before = torch.empty_like(length), torch.empty_like(length)
    block = power_of_two(rows)
    options = {"BLOCK": block, "num_warps": _warps(block), **pdl_trigger(length)}
    _append_rows[(1,)](length, waiting, slots, last, before, rows, **options)
    return slots, last, before


@triton.jit
def _append_block(
    length_at, waiting_at, tokens, slots, root, places, rows, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program."""
    pdl_wait(PDL)
    row = tl.arange(0, BLOCK)
    before = tl.load(length_at)
    waiting = tl.load(waiting_at)
    tl.store(slots + row, before + row, mask=row < rows)
    tl.store(places + row, before + waiting + row, mask=row < size)
    tl.store(root, tl.load(tokens + waiting - 1))
    tl.debug_barrier()  # every thread has read the length
    tl.store(length_at, before + waiting)


def append_block(
    length: Tensor, waiting: Tensor, tokens: Tensor, rows: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    assert tokens.is_contiguous()
    slots, root, places = (torch.empty(count, dtype=torch.long, device=length.device) for count in (rows, 1, size))
    block = power_of_two(max(rows, size))
    options = {"BLOCK": block, "num_warps": _warps(block), **pdl_trigger(length)}
    _append_block[(1,)](length, waiting, tokens, slots, root, places, rows, size, **options)
    return slots, root, places


@triton.jit
def _embed(
    tokens,
    embedding,
    positions,
    angles,
    embedded,
    row_angles,
    width,
    angles_width,
    last_position,
    embedding_row,
    angles_row,
    scale,
    mask,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_A: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row). Each token has ROWS rows: its embedding, and then the mask."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row // ROWS)
    position = tl.maximum(tl.minimum(tl.load(positions + row), last_position), 0)
    column = tl.arange(0, BLOCK)
    angle = tl.arange(0, BLOCK_A)
    source = embedding + token * embedding_row
    if ROWS > 1:
        source = tl.where(row % ROWS == 0, source, mask)
    vector = tl.load(source + column, mask=column < width)
    if SCALED:
        vector = (vector.to(tl.float32) * scale).to(vector.dtype)
    turn = tl.load(angles + position * angles_row + angle, mask=angle < angles_width)
    tl.store(embedded + row * width + column, vector, mask=column < width)
    tl.store(row_angles + row * angles_width + angle, turn, mask=angle < angles_width)


def embed(
    tokens: Tensor,
    embedding: Tensor,
    positions: Tensor,
    angles: Tensor,
    scale: float = 1.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, width, angles_width = len(positions), embedding.shape[1], angles.shape[1]
    assert tokens.is_contiguous() and positions.is_contiguous() and (rows == len(tokens) or mask is not None)
    assert mask is None or (mask.is_contiguous() and mask.dtype == embedding.dtype)
    embedded, row_angles = embedding.new_empty(rows, width), angles.new_empty(rows, angles_width)
    block = power_of_two(width)
    _embed[(rows,)](
        tokens,
        embedding,
        positions,
        angles,
        embedded,
        row_angles,
        width,
        angles_width,
        len(angles) - 1,
        embedding.stride(0),
        angles.stride(0),
        scale,
        embedding if mask is None else mask,
        ROWS=rows // len(tokens),
        SCALED=scale != 1,
        BLOCK=block,
        BLOCK_A=power_of_two(angles_width),
        num_warps=_warps(block),
        **pdl_launch(embedding),
    )
    return embedded, row_angles


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))
