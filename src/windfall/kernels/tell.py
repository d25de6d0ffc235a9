"""Bytes for the host, written there by a kernel: a copy among kernels would take several times as long."""

from __future__ import annotations

from torch import Tensor

from windfall.kernels.backend import on_triton


def tell(there: Tensor, here: Tensor) -> None:
    """here[:] = there, in the order of the stream; bytes, a multiple of 8, pinned on the host's side. What is told is
    there for the host once this is through."""
    assert there.numel() == here.numel() and there.numel() % 8 == 0
    if on_triton(there) and (here.is_pinned() or not there.is_cuda):
        from windfall.kernels.jit.tell import tell as compiled

        compiled(there, here)
    else:
        here.copy_(there, non_blocking=True)
