"""Copies, eight bytes at a time; the host's memory is written as if it were the device's."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, power_of_two
from windfall.kernels.jit.chain import begin

MOST = 512  # numbers of a program
FEW = 256  # of one that is a single warp: such a one is through with its own stores when it says so, everywhere


@triton.jit
def _tell(there, here, size, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Program (stretch)."""
    begin(CHAINED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(here + at, tl.load(there + at, mask=at < size), mask=at < size)


def tell(there: Tensor, here: Tensor) -> None:
    there, here = there.view(torch.int64), here.view(torch.int64)
    block = min(MOST, power_of_two(len(there)))
    warps = max(1, min(4, block // 64))
    _tell[(-(-len(there) // block),)](there, here, len(there), BLOCK=block, num_warps=warps, **follows(there))


@triton.jit
def _announce(
    there, blocks, turn_at, done_at, size, row, COUNT: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    """Program (stretch); the last to come through numbers the block."""
    begin(CHAINED)
    turn = tl.load(turn_at) + 1  # which changes when all have read it
    block = blocks + turn % COUNT * row
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(block + at, tl.load(there + at, mask=at < size), mask=at < size)
    tl.debug_barrier()
    others = tl.atomic_add(done_at, 1, sem="acq_rel", scope="sys")  # what this program wrote is there for all
    last = others == tl.num_programs(0) - 1
    tl.store(block + size, turn, mask=last)
    tl.store(turn_at, turn, mask=last)
    tl.store(done_at, others * 0, mask=last)


def announce(there: Tensor, blocks: Tensor, turn: Tensor, done: Tensor) -> None:
    there, blocks = there.view(torch.int64), blocks.view(torch.int64)
    assert blocks.is_contiguous()
    block = min(FEW, power_of_two(len(there)))
    _announce[(-(-len(there) // block),)](
        there,
        blocks,
        turn,
        done,
        len(there),
        blocks.shape[1],
        COUNT=len(blocks),
        BLOCK=block,
        num_warps=1,
        **follows(there),
    )
