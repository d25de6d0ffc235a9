"""Copies to pinned host memory, eight bytes per element. Kernels store to it as to device memory."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import pdl_launch, power_of_two
from windfall.kernels.triton.pdl import pdl_wait

MAX_BLOCK = 512  # elements that a program copies


@triton.jit
def _copy_to_host(source, target, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (block of elements)."""
    pdl_wait(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


def copy_to_host(source: Tensor, target: Tensor) -> None:
    source, target = source.view(torch.int64), target.view(torch.int64)
    grid, options = _launch(source)
    _copy_to_host[grid](source, target, len(source), **options)


@triton.jit
def _publish(
    source,
    blocks,
    sequence_at,
    finished_at,
    size,
    block_stride,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block of elements). The last program to finish writes the sequence number."""
    pdl_wait(PDL)
    sequence = tl.load(sequence_at) + 1  # the last program changes it, after all others have read it
    block = blocks + sequence % COUNT * block_stride
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(block + at, tl.load(source + at, mask=at < size), mask=at < size)
    tl.debug_barrier()
    others = tl.atomic_add(finished_at, 1, sem="acq_rel", scope="sys")  # releases this program's stores to the host
    last = others == tl.num_programs(0) - 1
    tl.store(block + size, sequence, mask=last)
    tl.store(sequence_at, sequence, mask=last)
    tl.store(finished_at, others * 0, mask=last)


def publish(source: Tensor, blocks: Tensor, sequence: Tensor, finished: Tensor) -> None:
    source, blocks = source.view(torch.int64), blocks.view(torch.int64)
    assert blocks.is_contiguous()
    grid, options = _launch(source)
    if torch.version.hip:
        options["num_warps"] = 1  # a barrier there does not wait for other warps' stores
    _publish[grid](source, blocks, sequence, finished, len(source), blocks.shape[1], COUNT=len(blocks), **options)


def _launch(source: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and launch options for a copy of this size."""
    block = min(MAX_BLOCK, power_of_two(len(source)))
    options = {"BLOCK": block, "num_warps": max(1, min(4, block // 64)), **pdl_launch(source)}
    return (-(-len(source) // block),), options
