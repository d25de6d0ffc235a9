"""The rows of a pass before its first layer, where they stand and what they bring: little work, in one launch each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton


def stand(length: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """Positions `length` [1] + `depth` [n], and slots from `length` on, [n] each."""
    if on_triton(depth):
        from windfall.kernels.triton.rows import stand as compiled

        return compiled(length, depth)
    return length + depth, length + torch.arange(len(depth), device=depth.device)


def take_in(length: Tensor, waiting: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of this many rows from `length` [1] on, `waiting` [1] - 1, which is the last that counts, and the length as
    it was; `length` becomes what it is behind those that wait."""
    if on_triton(length):
        from windfall.kernels.triton.rows import take_in as compiled

        return compiled(length, waiting, rows)
    before = length.clone()
    length.add_(waiting)
    return before + torch.arange(rows, device=length.device), waiting - 1, before


def embed(tokens: Tensor, embedding: Tensor, positions: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """embedding[tokens] [n, H], and angles[positions] [n, 2d], where positions past the last count as that."""
    if on_triton(embedding) and embedding.stride(1) == angles.stride(1) == 1:
        from windfall.kernels.triton.rows import embed as compiled

        return compiled(tokens, embedding, positions, angles)
    return F.embedding(tokens, embedding), angles[positions.clamp(max=len(angles) - 1)]
