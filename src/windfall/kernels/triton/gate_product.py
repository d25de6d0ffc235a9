"""A product with a gate and an up projection, and the gate, in one kernel: silu(gate(x)) * up(x).

A program computes the same outputs of both projections for its rows. Each sum is the one of `matmul`, to the bit, and
both are rounded before the gate, as if they had been stored.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"

import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, shared_memory, supports_pdl
from windfall.kernels.triton import matmul
from windfall.kernels.triton.matmul import Tile, _places
from windfall.kernels.triton.norm import gated
from windfall.kernels.triton.pdl import pdl_wait, prefetch

LEAST_OUTPUTS = 64  # of a projection, in a program: the fewest of a matrix instruction for 64 rows


@triton.jit
def _sums(
    x, more_x, weight, k_size, row_at, gate_at, up_at,
    BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, MORE: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 sums [BLOCK_O, BLOCK_N] of gate and up projection, and [BLOCK_O, MORE] of the further rows, if any."""
    gate = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    more_gate, more_up = gate, up
    if MORE > 0:
        more_gate = tl.zeros([BLOCK_O, MORE], tl.float32)
        more_up = tl.zeros([BLOCK_O, MORE], tl.float32)
        for k in tl.range(0, k_size, STEP, num_stages=STAGES):
            own, others = x.load([row_at, k]), more_x.load([row_at + BLOCK_N, k])
            gates, ups = weight.load([gate_at, k]), weight.load([up_at, k])
            gate = tl.dot(gates, own.T, gate)
            up = tl.dot(ups, own.T, up)
            more_gate = tl.dot(gates, others.T, more_gate)
            more_up = tl.dot(ups, others.T, more_up)
    else:
        for k in tl.range(0, k_size, STEP, num_stages=STAGES):
            own = x.load([row_at, k])
            gate = tl.dot(weight.load([gate_at, k]), own.T, gate)
            up = tl.dot(weight.load([up_at, k]), own.T, up)
    return gate, up, more_gate, more_up


@triton.jit
def _store(out, gate, up, rows, outs, n, width, GELU: tl.constexpr):
    kind = out.dtype.element_ty
    place, shown = _places(rows, outs, n, width)
    made = gated(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), kind, GELU)
    tl.store(out + place, made, mask=shown)


@triton.jit(do_not_specialize=["n"])
def _gate_product(
    x, more_x, weight, weight_at, out, n, width, k_size,
    GELU: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, MORE: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, PREFETCHED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of outputs)."""
    row_at = tl.program_id(0) * (BLOCK_N + MORE)
    out_at = tl.program_id(1) * BLOCK_O
    outs = out_at + tl.arange(0, BLOCK_O)
    if PDL:  # no kernel writes weights
        line = tl.arange(0, PREFETCHED // 64) * 64
        shown = (outs < width)[:, None] & (line < k_size)[None, :]
        first = weight_at + tl.where(shown, outs[:, None].to(tl.int64) * k_size + line[None, :], 0)
        prefetch(first)
        prefetch(first + width.to(tl.int64) * k_size)
    pdl_wait(PDL)
    gate, up, more_gate, more_up = _sums(
        x, more_x, weight, k_size, row_at, out_at, width + out_at, BLOCK_O, BLOCK_N, MORE, STEP, STAGES
    )
    _store(out, gate, up, row_at + tl.arange(0, BLOCK_N), outs, n, width, GELU)
    if MORE > 0:
        _store(out, more_gate, more_up, row_at + BLOCK_N + tl.arange(0, MORE), outs, n, width, GELU)


def supported(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel multiplies these operands: it loads with tensor descriptors, and takes K in one segment."""
    return (
        matmul.supported(x, weight) and matmul.segments_of(*weight.shape)[0] == 1 and choose_tile(x, weight) is not None
    )


def choose_tile(x: Tensor, weight: Tensor) -> Tile | None:
    """The tile of `matmul` for half as many outputs of each projection; None: it does not load with descriptors."""
    memory, (outputs, k) = shared_memory(x.device), weight.shape
    tile = matmul.choose_tile(len(x), outputs, k, supports_pdl(x.device) and matmul.aligned(x, weight), memory)
    if not tile.descriptors:
        return None
    tile = tile._replace(outputs=max(tile.outputs // 2, LEAST_OUTPUTS))
    fitting = memory // (2 * tile.step * (2 * tile.outputs + tile.height))  # two bytes for each element
    return tile._replace(stages=max(2, min(tile.stages, fitting)))


def gate_product(x: Tensor, weight: Tensor, gelu: bool = False) -> Tensor:
    """`gate_mul` of the product of x [n, K] and weight [2m, K] transposed → [n, m]."""
    (rows, k), width, tile = x.shape, len(weight) // 2, choose_tile(x, weight)
    assert tile is not None
    out = x.new_empty(rows, width)
    _gate_product[(-(-rows // tile.height), -(-width // tile.outputs))](
        *matmul.descriptors(x, weight, tile),
        weight,
        out,
        rows,
        width,
        k,
        GELU=gelu,
        BLOCK_O=tile.outputs,
        BLOCK_N=tile.rows,
        MORE=tile.more,
        STEP=tile.step,
        STAGES=tile.stages,
        PREFETCHED=matmul.prefetched_elements(2 * width, 1),
        num_warps=tile.warps,
        **pdl_launch(x),
    )
    return out
