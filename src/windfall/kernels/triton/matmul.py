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
    more: int = 0  # further rows; only with descriptors. `rows` and `more` are powers of two, and their sum need not be

    @property
    def height(self) -> int:
        """All rows of a program."""
        return self.rows + self.more


@triton.jit
def _tile_sum(
    x, more_x, weight, rows, outs, n, outputs, k_size, x_row, start, end, row_at, out_at,
    BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, MORE: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """[BLOCK_O, BLOCK_N] fp32: the products of elements [start, end) of K, added in ascending order.

    Also those of MORE further rows, or if there are none, the same sums again.
    """
    sums = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    more = sums
    if MORE > 0:
        more = tl.zeros([BLOCK_O, MORE], tl.float32)
        for k in tl.range(start, end, STEP, num_stages=STAGES):
            own, others = x.load([row_at, k]), more_x.load([row_at + BLOCK_N, k])
            shared = weight.load([out_at, k]).to(own.dtype)
            sums = tl.dot(shared, own.T, sums)
            more = tl.dot(shared, others.T, more)
    elif TMA:
        for k in tl.range(start, end, STEP, num_stages=STAGES):
            own = x.load([row_at, k])
            sums = tl.dot(weight.load([out_at, k]).to(own.dtype), own.T, sums)
        more = sums
    else:
        lane = tl.arange(0, STEP)
        x_at = x + rows[None, :].to(tl.int64) * x_row + lane[:, None]
        weight_at = weight + tl.minimum(outs, outputs - 1)[:, None].to(tl.int64) * k_size + lane[None, :]
        live = (rows < n)[None, :]
        for k in tl.range(start, end, STEP, num_stages=STAGES):
            own = tl.load(x_at + k, mask=live, other=0.0)
            sums = tl.dot(tl.load(weight_at + k).to(own.dtype), own, sums)
        more = sums
    return sums, more


@triton.jit
def _store(out, bias, scales, sums, rows, outs, n, outputs, BIAS: tl.constexpr, SCALED: tl.constexpr):
    if SCALED:
        sums *= tl.load(scales + outs, mask=outs < outputs, other=0.0)[:, None]
    if BIAS:
        sums += tl.load(bias + outs, mask=outs < outputs, other=0.0).to(tl.float32)[:, None]
    place, shown = _places(rows, outs, n, outputs)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=shown)


@triton.jit
def _places(rows, outs, n, outputs):
    """Where the outputs of these rows are in a result, and which of them exist."""
    place = rows[None, :].to(tl.int64) * outputs + outs[:, None]
    return place, (rows < n)[None, :] & (outs < outputs)[:, None]


@triton.jit
def _store_part(partials, sums, rows, outs, n, outputs):
    place, shown = _places(rows, outs, n, outputs)
    tl.store(partials + place, sums, mask=shown)


@triton.jit
def _total(partials, rows, outs, n, outputs, stride, SEGMENTS: tl.constexpr):
    """The sum of all segments, in ascending order."""
    place, shown = _places(rows, outs, n, outputs)
    parts = ()
    for each in tl.static_range(SEGMENTS):  # all loads are issued before the first sum
        parts += (tl.load(partials + each * stride + place, mask=shown, other=0.0, cache_modifier=".cg"),)
    total = parts[0]
    for each in tl.static_range(1, SEGMENTS):
        total += parts[each]
    return total


@triton.jit(do_not_specialize=["n"])
def _matmul(
    x, more_x, weight, weight_at, bias, scales, out, partials, counters, n, outputs, k_size, segment, x_row,
    SEGMENTS: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr, MORE: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    PREFETCHED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of outputs, segment if SPLIT): the rows' tiles share a weight in the L2 cache."""
    row_at = tl.program_id(0) * (BLOCK_N + MORE)
    out_at = tl.program_id(1) * BLOCK_O
    outs = out_at + tl.arange(0, BLOCK_O)
    rows = row_at + tl.arange(0, BLOCK_N)
    more_rows = rows
    if MORE > 0:
        more_rows = row_at + BLOCK_N + tl.arange(0, MORE)
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
        sums, more = _tile_sum(
            x, more_x, weight, rows, outs, n, outputs, k_size, x_row, own * segment,
            tl.minimum((own + 1) * segment, k_size), row_at, out_at, BLOCK_O, BLOCK_N, MORE, STEP, STAGES, TMA,
        )  # fmt: skip
        stride = n.to(tl.int64) * outputs
        _store_part(partials + own * stride, sums, rows, outs, n, outputs)
        if MORE > 0:
            _store_part(partials + own * stride, more, more_rows, outs, n, outputs)
        counter = counters + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.debug_barrier()  # all threads have stored their sums before the counter is raised
        before = tl.atomic_add(counter, 1, sem="release", scope="gpu")
        tl.debug_barrier()
        if before == SEGMENTS - 1:
            total = _total(partials, rows, outs, n, outputs, stride, SEGMENTS)
            _store(out, bias, scales, total, rows, outs, n, outputs, BIAS, SCALED)
            if MORE > 0:
                total = _total(partials, more_rows, outs, n, outputs, stride, SEGMENTS)
                _store(out, bias, scales, total, more_rows, outs, n, outputs, BIAS, SCALED)
            tl.store(counter, 0)  # for the next launch
    else:
        total, more_total = _tile_sum(
            x, more_x, weight, rows, outs, n, outputs, k_size, x_row, 0, tl.minimum(segment, k_size),
            row_at, out_at, BLOCK_O, BLOCK_N, MORE, STEP, STAGES, TMA,
        )  # fmt: skip
        for each in tl.range(1, SEGMENTS):
            sums, more = _tile_sum(
                x, more_x, weight, rows, outs, n, outputs, k_size, x_row, each * segment,
                tl.minimum((each + 1) * segment, k_size), row_at, out_at, BLOCK_O, BLOCK_N, MORE, STEP, STAGES, TMA,
            )  # fmt: skip
            total += sums
            if MORE > 0:
                more_total += more
        _store(out, bias, scales, total, rows, outs, n, outputs, BIAS, SCALED)
        if MORE > 0:
            _store(out, bias, scales, more_total, more_rows, outs, n, outputs, BIAS, SCALED)


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
    fitting = memory // (2 * tile.step * (tile.outputs + tile.height))  # two bytes for each element
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
        return -(-outputs // tile.outputs) * -(-rows // tile.height)

    small = Tile(64, 64, long, 4, 4, True)
    if k <= MIN_SEGMENT and programs(small) <= FEW_TILES:
        taller = Tile(64, 128, STEP, 5, 4, True)
        return taller if rows > 192 and programs(small) > ENOUGH_TILES else small
    if k < SHORT_K:
        many = outputs >= MANY_OUTPUTS and rows > 128
        return Tile(128, 128, STEP, 3, 8, True) if many else Tile(64, 128, STEP, 3, 4, True)
    if outputs >= MANY_OUTPUTS:
        return _tile_of_many(rows, outputs)
    if rows <= 192 and not 96 < rows <= 128:
        tall = _of_height(64, _even_height(rows, 1), 5, 4)
        return tall if programs(tall) <= ENOUGH_TILES else _of_height(128, tall.height, 5, 8)
    flat, square, huge = Tile(64, 128, long, 4, 4, True), Tile(128, 128, STEP, 5, 8, True), _of_height(128, 256, 4, 8)
    tiles, enough, last = (flat, square, huge), ENOUGH_TILES, square
    if 192 < rows <= 256 and segments_of(outputs, k)[0] > 1:
        enough = ENOUGH_TILES // 2  # segments of so few tiles have programs of their own
    elif 256 < rows <= 384:
        tall, last = _of_height(64, _even_height(rows, 2), 5, 4), _of_height(128, 96, 4, 4)
        tiles = tall, Tile(256, 64, STEP, 5, 8, True), last
    elif rows > 512:
        return square
    return next((tile for tile in tiles if programs(tile) <= enough), last)


def _tile_of_many(rows: int, outputs: int) -> Tile:
    """The tile for more than 64 rows and many outputs."""
    one_wave = -(-outputs // 256) <= ENOUGH_TILES  # of tiles of 256 outputs
    if rows <= 192:
        height = _even_height(rows, 1)
        return (
            _of_height(256, max(height, 128), 4, 8)
            if one_wave
            else _of_height(128, height, 5, 4 if height < 128 else 8)
        )
    if 256 < rows <= 320:
        return _of_height(128, 320, 4, 8)
    if 320 < rows <= 384:
        return _of_height(256, 128 if one_wave else 192, 4, 8)
    return Tile(128, 128, STEP, 5, 8, True) if one_wave and 384 < rows <= 512 else _of_height(128, 256, 4, 8)


def _even_height(rows: int, blocks: int) -> int:
    """The height of this number of blocks that hold all rows; a multiple of 32."""
    return -(-rows // (32 * blocks)) * 32


def _of_height(outputs: int, height: int, stages: int, warps: int) -> Tile:
    """A tile of a height that is a power of two or the sum of two."""
    rows = power_of_two(height + 1) // 2
    return Tile(outputs, rows, STEP, stages, warps, True, height - rows)


def supported(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel multiplies these operands."""
    return x.shape[1] % STEP == 0 and weight.is_contiguous() and x.stride(1) == 1


def aligned(x: Tensor, weight: Tensor) -> bool:
    """Whether tensor descriptors can describe these operands."""
    return x.stride(0) % 8 == 0 and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0


def descriptors(x: Tensor, weight: Tensor, tile: Tile) -> tuple[Any, Any, Any]:
    """Of blocks of the rows, of the further rows, and of the weight."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return (
        TensorDescriptor.from_tensor(x, [tile.rows, tile.step]),
        TensorDescriptor.from_tensor(x, [tile.more or tile.rows, tile.step]),
        TensorDescriptor.from_tensor(weight, [tile.outputs, tile.step]),
    )


def matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """x [n, K] times weight [O, K] transposed, plus bias [O] → [n, O]. With `scales` [O], the weight is int8."""
    (rows, k), outputs = x.shape, len(weight)
    segments, size = segments_of(outputs, k)
    tile = choose_tile(rows, outputs, k, supports_pdl(x.device) and aligned(x, weight), shared_memory(x.device))
    tiles, blocks = -(-outputs // tile.outputs), -(-rows // tile.height)  # of outputs, of rows
    out = x.new_empty(rows, outputs) if out is None else out
    assert out.is_contiguous() and out.shape == (rows, outputs)
    counts = counters(x.device) if splits(tiles * blocks, segments) else None
    split = counts is not None
    partials = torch.empty((segments, rows, outputs), device=x.device) if split else out
    _matmul[(blocks, tiles, segments if split else 1)](
        *(descriptors(x, weight, tile) if tile.descriptors else (x, x, weight)),
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
        MORE=tile.more,
        STEP=tile.step,
        STAGES=tile.stages,
        TMA=tile.descriptors,
        PREFETCHED=prefetched_elements(outputs, segments),
        num_warps=tile.warps,
        **pdl_launch(x),
    )
    return out
