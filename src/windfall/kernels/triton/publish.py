"""Copies, eight bytes at a time; the host's memory is written as if it were the device's."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import follows, power_of_two
from windfall.kernels.triton.chain import begin

MOST = 512  # numbers of a program


@triton.jit
def _tell(there, here, size, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Program (stretch)."""
    begin(CHAINED)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(here + at, tl.load(there + at, mask=at < size), mask=at < size)


def tell(there: Tensor, here: Tensor) -> None:
    there, here = there.view(torch.int64), here.view(torch.int64)
    grid, how = _stretches(there)
    _tell[grid](there, here, len(there), **how)


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
    grid, how = _stretches(there)
    if torch.version.hip:
        how["num_warps"] = 1  # a barrier there does not wait for other warps' stores
    _announce[grid](there, blocks, turn, done, len(there), blocks.shape[1], COUNT=len(blocks), **how)


def _stretches(there: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """The programs for so much, and how they are made."""
    block = min(MOST, power_of_two(len(there)))
    how = {"BLOCK": block, "num_warps": max(1, min(4, block // 64)), **follows(there)}
    return (-(-len(there) // block),), how
