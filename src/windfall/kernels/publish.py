"""Bytes for the host, written there by a kernel: a copy among kernels would take several times as long."""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton

NUMBER = 16  # bytes behind a block's own, of which the first eight are its number


def tell(there: Tensor, here: Tensor) -> None:
    """here[:] = there, in the order of the stream; bytes, a multiple of 8, pinned on the host's side. What is told is
    there for the host once this is through."""
    assert there.numel() == here.numel() and there.numel() % 8 == 0
    if on_triton(there) and (here.is_pinned() or not there.is_cuda):
        from windfall.kernels.triton.publish import tell as compiled

        compiled(there, here)
    else:
        here.copy_(there, non_blocking=True)


def announce(
    there: Tensor,  # [n] bytes, a multiple of 8
    blocks: Tensor,  # [b, n + NUMBER] bytes, pinned on the host's side
    turn: Tensor,  # [1] long, written: how often this was done
    done: Tensor,  # [1] int32, 0 before and after
) -> None:
    """turn += 1; the block turn % b becomes `there`, and behind it the turn, which the host sees last: once it is
    there, so is the rest."""
    assert blocks.shape[1] == len(there) + NUMBER and len(there) % 8 == 0
    if on_triton(there) and (blocks.is_pinned() or not there.is_cuda):
        from windfall.kernels.triton.publish import announce as compiled

        compiled(there, blocks, turn, done)
    else:
        reference(there, blocks, turn, done)


def reference(there: Tensor, blocks: Tensor, turn: Tensor, done: Tensor) -> None:
    turn.add_(1)
    told = torch.cat([there, turn.view(torch.uint8), turn.view(torch.uint8)])
    found = blocks.to(there.device, non_blocking=True)
    found.index_copy_(0, turn % len(blocks), told[None])
    blocks.copy_(found, non_blocking=True)
