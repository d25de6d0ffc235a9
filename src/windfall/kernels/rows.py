"""Inputs of a forward pass: positions, KV cache slots, embeddings and rotary angles, one launch each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton


def positions_and_slots(length: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """Positions `length` [1] + `depth` [n], and KV cache slots `length` + 0, 1, ..., n - 1; both [n]."""
    if on_triton(depth):
        from windfall.kernels.triton.rows import positions_and_slots as compiled

        return compiled(length, depth)
    return length + depth, length + torch.arange(len(depth), device=depth.device)


def append_rows(length: Tensor, waiting: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Append `waiting` [1] of `rows` rows to a KV cache of `length` [1] rows; the other rows are padding.

    Adds `waiting` to `length` in place. Returns the slots of all rows [rows], the index of the last row that is not
    padding [1], and the length before [1].
    """
    if on_triton(length):
        from windfall.kernels.triton.rows import append_rows as compiled

        return compiled(length, waiting, rows)
    before = length.clone()
    length.add_(waiting)
    return before + torch.arange(rows, device=length.device), waiting - 1, before


def embed(
    tokens: Tensor, embedding: Tensor, positions: Tensor, angles: Tensor, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """scale * embedding[tokens] [n, H] and angles[positions] [n, a]. Positions past the table use its last row."""
    if on_triton(embedding) and embedding.stride(1) == angles.stride(1) == 1:
        from windfall.kernels.triton.rows import embed as compiled

        return compiled(tokens, embedding, positions, angles, scale)
    embedded = F.embedding(tokens, embedding)
    return embedded if scale == 1 else embedded * scale, angles[positions.clamp(max=len(angles) - 1)]
