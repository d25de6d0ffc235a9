"""Matrix products whose rounding depends on the weight's shape and on nothing else.

Every output is a sum over K in one order. K is cut into segments, whose number depends on the weight alone. Matrix
instructions add the products of a segment, sixteen at a time in ascending order; then the segments are added in
ascending order. Neither the number of rows nor the tile plays a part in this, so a row has the same bits in every pass.
(On NVIDIA GPUs the instructions for 16 rows and for 64 rows round alike; tests/gpu checks it.)

The outputs are the first operand and the rows the second: a tile of 64 or 128 outputs needs only 16 rows beside it. Few
rows leave segments to different programs, and the last of them to finish adds their sums.

A weight may be in int8, with a scale for each output. It is multiplied in the precision of the rows, which can hold all
int8 numbers.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two, shared_memory, supports_pdl
from windfall.kernels.triton.counters import COUNTERS, counters
from windfall.kernels.triton.pdl import pdl_wait, prefetch

STEP = 64  # elements of K; K must be a multiple
SEGMENT_UNIT = 256  # elements of K; all segments but the last are multiples
MIN_SEGMENT = 2048  # elements of K
ENOUGH_TILES = 128  # about one for each multiprocessor
FEW_TILES = 264  # of 64 outputs and 64 rows each: two for each multiprocessor
MANY_OUTPUTS = 16_384  # from here on, tiles of 256 outputs still occupy all multiprocessors
PREFETCHED_BYTES = 2**23  # of a weight, requested while the previous kernel still runs
MIN_PREFETCHED, MAX_PREFETCHED = 256, 1024  # elements of K that are requested early, in each segment
SHORT_K = 1024  # loops over fewer elements are too short for large tiles
LONG_K = 8192  # loops over more have one stage more


class Tile(NamedTuple):
    """Outputs and rows of a program, elements of K that it loads at a time, and how it runs."""

    outputs: int
    rows: int
    step: int
    stages: int
    warps: int
    descriptors: bool  # load with tensor descriptors (TMA)


@triton.jit
def _tile_sum(
    x, weight, rows, outs, n, outputs, k_size, x_row, start, end, row_at, out_at,
    BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[BLOCK_O, BLOCK_N] fp32: the products of elements [start, end) of K, added in ascending order."""
    sums = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    if TMA:
        for k in tl.range(start, end, STEP, num_stages=STAGES):
            own = x.load([row_at, k])
            sums = tl.dot(weight.load([out_at, k]).to(own.dtype), own.T, sums)
    else:
        lane = tl.arange(0, STEP)
        x_at = x + rows[None, :].to(tl.int64) * x_row + lane[:, None]
        weight_at = weight + tl.minimum(outs, outputs - 1)[:, None].to(tl.int64) * k_size + lane[None, :]
        live = (rows < n)[None, :]
        for k in tl.range(start, end, STEP, num_stages=STAGES):
            own = tl.load(x_at + k, mask=live, other=0.0)
            sums = tl.dot(tl.load(weight_at + k).to(own.dtype), own, sums)
    return sums


@triton.jit
def _store(out, bias, scales, sums, outs, place, shown, outputs, BIAS: tl.constexpr, SCALED: tl.constexpr):
    if SCALED:
        sums *= tl.load(scales + outs, mask=outs < outputs, other=0.0)[:, None]
    if BIAS:
        sums += tl.load(bias + outs, mask=outs < outputs, other=0.0).to(tl.float32)[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=shown)


@triton.jit(do_not_specialize=["n"])
def _matmul(
    x, weight, weight_at, bias, scales, out, partials, counters, n, outputs, k_size, segment, x_row,
    SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, PREFETCHED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of outputs, segment if SPLIT): the rows' tiles share a weight in the L2 cache."""
    row_at = tl.program_id(0) * BLOCK_N
    out_at = tl.program_id(1) * BLOCK_O
    outs = out_at + tl.arange(0, BLOCK_O)
    rows = row_at + tl.arange(0, BLOCK_N)
    place = rows[None, :].to(tl.int64) * outputs + outs[:, None]
    shown = (rows < n)[None, :] & (outs < outputs)[:, None]
    if PDL:  # no kernel writes weights
        line = tl.program_id(2) * segment + tl.arange(0, PREFETCHED // 64) * 64
        prefetch(
            weight_at
            + tl.minimum(outs, outputs - 1)[:, None].to(tl.int64) * k_size
            + tl.minimum(line, k_size - 64)[None, :]
        )
    pdl_wait(PDL)
    if SPLIT:
        own = tl.program_id(2)
        sums = _tile_sum(
            x, weight, rows, outs, n, outputs, k_size, x_row, own * segment, tl.minimum((own + 1) * segment, k_size),
            row_at, out_at, BLOCK_O, BLOCK_N, STEP, STAGES, TMA,
        )  # fmt: skip
        stride = n.to(tl.int64) * outputs
        tl.store(partials + own * stride + place, sums, mask=shown)
        counter = counters + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.debug_barrier()  # all threads have stored their sums before the counter is raised
        before = tl.atomic_add(counter, 1, sem="release", scope="gpu")
        tl.debug_barrier()
        if before == SEGMENTS - 1:
            parts = ()
            for each in tl.static_range(SEGMENTS):  # all loads are issued before the first sum
                parts += (tl.load(partials + each * stride + place, mask=shown, other=0.0, cache_modifier=".cg"),)
            total = parts[0]
            for each in tl.static_range(1, SEGMENTS):
                total += parts[each]
            _store(out, bias, scales, total, outs, place, shown, outputs, BIAS, SCALED)
            tl.store(counter, 0)  # for the next launch
    else:
        total = _tile_sum(
            x, weight, rows, outs, n, outputs, k_size, x_row, 0, tl.minimum(segment, k_size),
            row_at, out_at, BLOCK_O, BLOCK_N, STEP, STAGES, TMA,
        )  # fmt: skip
        for each in tl.range(1, SEGMENTS):
            total += _tile_sum(
                x, weight, rows, outs, n, outputs, k_size, x_row, each * segment,
                tl.minimum((each + 1) * segment, k_size), row_at, out_at, BLOCK_O, BLOCK_N, STEP, STAGES, TMA,
            )  # fmt: skip
        _store(out, bias, scales, total, outs, place, shown, outputs, BIAS, SCALED)


def segments_of(outputs: int, k: int) -> tuple[int, int]:
    """The number of segments of K for this weight, and the elements of each but the last."""
    wanted = min(ENOUGH_TILES // -(-outputs // 64), k // MIN_SEGMENT)
    if wanted <= 1:
        return 1, k
    size = -(-k // (wanted * SEGMENT_UNIT)) * SEGMENT_UNIT
    return -(-k // size), size


def splits(tiles: int, segments: int) -> bool:
    """Whether a tile's segments go to programs of their own; otherwise one program takes all of them.

    They do if the tiles alone would leave half of the multiprocessors idle.
    """
    return segments > 1 and tiles <= min(ENOUGH_TILES // 2, COUNTERS)


def prefetched_elements(outputs: int, segments: int) -> int:
    """How many elements of K of each segment are requested early; a power of two."""
    fitting = PREFETCHED_BYTES // (2 * outputs * segments)  # two bytes for each element
    return max(MIN_PREFETCHED, min(MAX_PREFETCHED, power_of_two(fitting + 1) // 2))


def choose_tile(rows: int, outputs: int, k: int, descriptors: bool, memory: int) -> Tile:
    """The tile for this number of rows; it changes the speed and no bit. `memory` is that of one program."""
    long = 2 * STEP if k % (2 * STEP) == 0 else STEP
    if not descriptors:
        tile = Tile(64, 16 if rows <= 16 else 32 if rows <= 32 else 64, long if rows <= 32 else STEP, 4, 4, False)
    else:
        tile = _small_tile(rows, outputs, k, long) if rows <= 64 else _large_tile(rows, outputs, k, long)
    fitting = memory // (2 * tile.step * (tile.outputs + tile.rows))  # two bytes for each element
    return tile._replace(stages=max(2, min(tile.stages, fitting)))


def _small_tile(rows: int, outputs: int, k: int, long: int) -> Tile:
    """The tile for at most 64 rows."""
    height = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if long == STEP and height == 16:
        return Tile(128, 16, STEP, 4, 4, False) if k < SHORT_K else Tile(64, 16, STEP, 8, 4, False)
    if long == STEP:
        return Tile(128 if height == 32 else 64, height, STEP, 6, 4, True)
    if height == 64 and outputs >= MANY_OUTPUTS and k >= SHORT_K:
        return Tile(256, 64, STEP, 4, 8, True)
    stages = (6 if k >= LONG_K else 5) if height == 16 else 4
    return Tile(128 if outputs >= 4 * MANY_OUTPUTS and height < 64 else 64, height, long, stages, 4, True)


def _large_tile(rows: int, outputs: int, k: int, long: int) -> Tile:
    """The tile for more than 64 rows, by the fastest ones in benchmarks/products.py --tiles."""

    def programs(tile: Tile) -> int:
        return -(-outputs // tile.outputs) * -(-rows // tile.rows)

    small = Tile(64, 64, long, 4, 4, True)
    if k <= MIN_SEGMENT and programs(small) <= FEW_TILES:
        taller = Tile(64, 128, STEP, 5, 4, True)
        return taller if rows > 192 and programs(small) > ENOUGH_TILES else small
    if k < SHORT_K:
        many = outputs >= MANY_OUTPUTS and rows > 128
        return Tile(128, 128, STEP, 3, 8, True) if many else Tile(64, 128, STEP, 3, 4, True)
    square, huge = Tile(128, 128, STEP, 5, 8, True), Tile(128, 256, STEP, 4, 8, True)
    if outputs >= MANY_OUTPUTS:
        if rows <= 192 or 256 < rows <= 384:
            return Tile(256, 128, STEP, 4, 8, True)
        return square if 384 < rows <= 512 else huge
    if rows <= 128:
        return Tile(64, 128, long, 4, 4, True)
    if rows <= 192:
        wide = Tile(128, 64, long, 4, 4, True)
        return wide if programs(wide) <= ENOUGH_TILES else Tile(256, 64, STEP, 5, 4, True)
    if rows > 512:
        return square
    return next(
        (tile for tile in (Tile(64, 128, long, 4, 4, True), square, huge) if programs(tile) <= ENOUGH_TILES), square
    )


def supported(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel multiplies these operands."""
    return x.shape[1] % STEP == 0 and weight.is_contiguous() and x.stride(1) == 1


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """x [n, K] times weight [O, K] transposed, plus bias [O] → [n, O]. With `scales` [O], the weight is int8."""
    (rows, k), outputs = x.shape, len(weight)
    segments, size = segments_of(outputs, k)
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    tile = choose_tile(rows, outputs, k, supports_pdl(x.device) and aligned, shared_memory(x.device))
    tiles, blocks = -(-outputs // tile.outputs), -(-rows // tile.rows)  # of outputs, of rows
    out = x.new_empty(rows, outputs) if out is None else out
    assert out.is_contiguous() and out.shape == (rows, outputs)
    counts = counters(x.device) if splits(tiles * blocks, segments) else None
    split = counts is not None
    partials = torch.empty((segments, rows, outputs), device=x.device) if split else out
    given: tuple[Any, Any] = (x, weight)
    if tile.descriptors:
        from triton.tools.tensor_descriptor import TensorDescriptor

        given = (
            TensorDescriptor.from_tensor(x, [tile.rows, tile.step]),
            TensorDescriptor.from_tensor(weight, [tile.outputs, tile.step]),
        )
    _matmul[(blocks, tiles, segments if split else 1)](
        *given,
        weight,
        weight if bias is None else bias,
        weight if scales is None else scales,
        out,
        partials,
        counts if split else out,
        rows,
        outputs,
        k,
        size,
        x.stride(0),
        SEGMENTS=segments,
        SPLIT=split,
        BIAS=bias is not None,
        SCALED=scales is not None,
        BLOCK_O=tile.outputs,
        BLOCK_N=tile.rows,
        STEP=tile.step,
        STAGES=tile.stages,
        TMA=tile.descriptors,
        PREFETCHED=prefetched_elements(outputs, segments),
        num_warps=tile.warps,
        **pdl_launch(x),
    )
    return out
