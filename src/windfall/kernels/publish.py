"""Results for the host. A kernel writes them to pinned host memory, which costs less than a copy between kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton

SEQUENCE_BYTES = 16  # at the end of a block; the first eight are its sequence number


def copy_to_host(source: Tensor, target: Tensor) -> None:
    """target[:] = source, in stream order. Both are bytes, a multiple of 8; `target` is pinned host memory.

    The host may read `target` after it has synchronized with the stream.
    """
    assert source.numel() == target.numel() and source.numel() % 8 == 0
    if on_triton(source) and (target.is_pinned() or not source.is_cuda):
        from windfall.kernels.triton.publish import copy_to_host as compiled

        compiled(source, target)
    else:
        target.copy_(source, non_blocking=True)


def publish(
    source: Tensor,  # [n] bytes, a multiple of 8
    blocks: Tensor,  # [b, n + SEQUENCE_BYTES] bytes: a ring of blocks in pinned host memory
    sequence: Tensor,  # [1] long, written: sequence number of the last publication
    finished: Tensor,  # [1] int32: counts finished programs; 0 before and after
) -> None:
    """Increment the sequence number and copy `source` and the number into block (number % b).

    The number becomes visible to the host last: a host that polls it finds the whole block once it reads the number.
    """
    assert blocks.shape[1] == len(source) + SEQUENCE_BYTES and len(source) % 8 == 0
    if on_triton(source) and (blocks.is_pinned() or not source.is_cuda):
        from windfall.kernels.triton.publish import publish as compiled

        compiled(source, blocks, sequence, finished)
    else:
        reference(source, blocks, sequence, finished)


def reference(source: Tensor, blocks: Tensor, sequence: Tensor, finished: Tensor) -> None:
    """`publish` with torch."""
    sequence.add_(1)
    block = torch.cat([source, sequence.view(torch.uint8), sequence.view(torch.uint8)])
    ring = blocks.to(source.device, non_blocking=True)
    ring.index_copy_(0, sequence % len(blocks), block[None])
    blocks.copy_(ring, non_blocking=True)
