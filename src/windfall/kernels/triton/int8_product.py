"""Products of few rows with a weight in int8, by the tensor cores' instructions for int8.

`matmul` converts such a weight to half precision in registers, and with few rows that takes longer than reading it.
Here the rows become int8. A row has outliers, so it goes in as two rows of int8: the rounded row, and what is left of
it in finer units. Sums of int8 products are exact in int32, whatever their order.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two, shared_memory, supports_pdl
from windfall.kernels.triton.counters import COUNTERS, counters
from windfall.kernels.triton.matmul import (
    ENOUGH_TILES,
    FEW_TILES,
    MANY_OUTPUTS,
    _store,
    _store_part,
    _total,
    prefetched_elements,
)
from windfall.kernels.triton.pdl import pdl_wait, prefetch

STEP = 128  # elements of K; K must be a multiple
MAX_K = 2**17  # more elements could overflow a sum
MIN_SEGMENT = 1024  # elements of K
MAX_HELD = 128  # sums of segments that a thread holds while it adds them
LARGEST = tl.constexpr(127)  # in int8
FINE_FACTOR = tl.constexpr(254)  # finer units in one of the row: what is left is half a unit at most


class Tile(NamedTuple):
    """Outputs and rows of a program, elements of K that it loads at a time, and how it runs.

    `segments` of K go to programs of their own.
    """

    outputs: int
    rows: int
    step: int
    stages: int
    warps: int
    segments: int


@triton.jit
def _split_rows(x, parts, row_scales, k_size, x_row, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row): its rounded form and the rest beside each other in `parts` [n, 2, K], and its scale."""
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    shown = lane < k_size
    wide = tl.load(x + row * x_row + lane, mask=shown, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), 1e-20) / LARGEST
    wide /= scale
    high = tl.floor(wide + 0.5)
    low = tl.floor((wide - high) * FINE_FACTOR + 0.5)
    place = parts + 2 * row * k_size + lane
    tl.store(place, high.to(tl.int8), mask=shown)
    tl.store(place + k_size, low.to(tl.int8), mask=shown)
    tl.store(row_scales + row, scale)


@triton.jit
def _store_scaled(out, bias, scales, row_scales, sums, rows, outs, n, outputs, BIAS: tl.constexpr):
    sums *= tl.load(row_scales + rows, mask=rows < n, other=0.0)[None, :]
    _store(out, bias, scales, sums, rows, outs, n, outputs, BIAS, True)


@triton.jit(do_not_specialize=["n"])
def _int8_product(
    parts, weight, weight_at, bias, scales, row_scales, out, partials, counters, n, outputs, k_size, segment,
    SEGMENTS: tl.constexpr, BIAS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, PREFETCHED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of outputs, segment): the rows' tiles share a weight in the L2 cache.

    The two parts of a row are columns beside each other of one matrix instruction, and in registers of one thread.
    """
    row_at = tl.program_id(0) * BLOCK_N
    out_at = tl.program_id(1) * BLOCK_O
    own = tl.program_id(2)
    outs = out_at + tl.arange(0, BLOCK_O)
    rows = row_at + tl.arange(0, BLOCK_N)
    if PDL:  # no kernel writes weights
        line = own * segment + tl.arange(0, PREFETCHED // 128) * 128
        first = tl.minimum(outs, outputs - 1)[:, None].to(tl.int64) * k_size + tl.minimum(line, k_size - 1)[None, :]
        prefetch(weight_at + first)
    pdl_wait(PDL)
    both = tl.zeros([BLOCK_O, 2 * BLOCK_N], tl.int32)
    for k in tl.range(own * segment, tl.minimum((own + 1) * segment, k_size), STEP, num_stages=STAGES):
        both = tl.dot(weight.load([out_at, k]), parts.load([2 * row_at, k]).T, both, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(both, [BLOCK_O, BLOCK_N, 2]))
    sums = high.to(tl.float32) + low.to(tl.float32) * (1 / FINE_FACTOR)
    if SEGMENTS > 1:
        stride = n.to(tl.int64) * outputs
        _store_part(partials + own * stride, sums, rows, outs, n, outputs)
        counter = counters + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.debug_barrier()  # all threads have stored their sums before the counter is raised
        before = tl.atomic_add(counter, 1, sem="release", scope="gpu")
        tl.debug_barrier()
        if before == SEGMENTS - 1:
            sums = _total(partials, rows, outs, n, outputs, stride, SEGMENTS)
            _store_scaled(out, bias, scales, row_scales, sums, rows, outs, n, outputs, BIAS)
            tl.store(counter, 0)  # for the next launch
    else:
        _store_scaled(out, bias, scales, row_scales, sums, rows, outs, n, outputs, BIAS)


def choose_tile(rows: int, outputs: int, k: int, memory: int) -> Tile:
    """The tile for this number of rows. `memory` is that of one program.

    The parts of rows are read for each tile of outputs, so many rows need large tiles. With few rows, two programs fit
    a multiprocessor.
    """
    height = min(max(power_of_two(rows), 8), 64)
    if height == 64 and outputs >= MANY_OUTPUTS:
        tile = Tile(256, height, STEP, 4, 8, 1)
    else:
        step = 2 * STEP if k % (2 * STEP) == 0 else STEP
        tile = Tile(64, height, step, 5 if height <= 16 else 4, 4, 1)
    fitting = (memory // 2 if height <= 16 else memory) // (tile.step * (tile.outputs + 2 * height))
    wanted = (FEW_TILES if height <= 16 else ENOUGH_TILES) // (-(-outputs // tile.outputs) * -(-rows // height))
    most = MAX_HELD * 32 * tile.warps // (tile.outputs * height)
    return tile._replace(segments=max(1, min(wanted, k // MIN_SEGMENT, most)), stages=max(2, min(tile.stages, fitting)))


def supported(x: Tensor, values: Tensor) -> bool:
    """Whether this kernel multiplies these operands: it loads with tensor descriptors."""
    rows, k = x.shape
    return (
        supports_pdl(x.device)
        and rows > 0
        and k % STEP == 0
        and k <= MAX_K
        and x.stride(1) == 1
        and values.is_contiguous()
        and values.data_ptr() % 16 == 0
    )


def split_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[n, K] → int8 [2n, K], two rows for each, and the scale of each row of x, fp32 [n]."""
    (rows, k), block = x.shape, power_of_two(x.shape[1])
    parts, row_scales = x.new_empty(2 * rows, k, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
    warps = max(4, min(block // 1024, 32))
    _split_rows[(rows,)](x, parts, row_scales, k, x.stride(0), BLOCK=block, num_warps=warps, **pdl_launch(x))
    return parts, row_scales


def int8_product(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [n, K] times int8 values [O, K] transposed, times scales [O], plus bias [O] → [n, O]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, k), outputs = x.shape, len(values)
    tile = choose_tile(rows, outputs, k, shared_memory(x.device))
    tiles, blocks = -(-outputs // tile.outputs), -(-rows // tile.rows)  # of outputs, of rows
    counts = counters(x.device) if tile.segments > 1 and tiles * blocks <= COUNTERS else None
    size = k if counts is None else -(-k // (tile.segments * tile.step)) * tile.step
    segments = -(-k // size)
    parts, row_scales = split_rows(x)
    out = x.new_empty(rows, outputs)
    _int8_product[(blocks, tiles, segments)](
        TensorDescriptor.from_tensor(parts, [2 * tile.rows, tile.step]),
        TensorDescriptor.from_tensor(values, [tile.outputs, tile.step]),
        values,
        values if bias is None else bias,
        scales,
        row_scales,
        out,
        out if segments == 1 else torch.empty((segments, rows, outputs), device=x.device),
        out if counts is None else counts,
        rows,
        outputs,
        k,
        size,
        SEGMENTS=segments,
        BIAS=bias is not None,
        BLOCK_O=tile.outputs,
        BLOCK_N=tile.rows,
        STEP=tile.step,
        STAGES=tile.stages,
        PREFETCHED=2 * prefetched_elements(outputs, segments),  # as many bytes as of a weight in half precision
        num_warps=tile.warps,
        **pdl_launch(x),
    )
    return out
