"""Inputs of a forward pass: positions, KV cache slots, paths, embeddings and rotary angles, one launch each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton


class Placed(NamedTuple):
    """Where the rows of a pass stand in the text, and where the keys of their paths lie in the KV cache."""

    positions: Tensor  # [n] long
    slots: Tensor  # [n] long: where their own keys and values go
    reach: Tensor  # [n] long: keys that each row sees, its own included; 0 for padding
    lineage: Tensor | None  # [n, S] int32: the slot of its ancestor at each depth; None: the rows are a chain


def place_rows(length: Tensor, depth: Tensor, count: Tensor, mask: Tensor | None) -> Placed:
    """Place the rows of a tree after `length` [1] committed rows; rows from `count` [1] on are padding.

    depth [n] long; mask [n, n] bool marks the ancestors of each row and itself. None: the rows are a chain, in order.
    """
    if on_triton(depth):
        from windfall.kernels.triton.rows import place_rows as compiled

        return Placed(*compiled(length, depth, count, mask))
    rows = torch.arange(len(depth), device=depth.device)
    positions, slots = length + depth, length + rows
    lineage = None if mask is None else length.int() + ancestors(mask, depth)
    return Placed(positions, slots, (positions + 1) * (rows < count), lineage)


def ancestors(mask: Tensor, depth: Tensor) -> Tensor:
    """Each row's ancestor (or itself) at each depth → [n, S] int32, 0 where there is none.

    mask [n, S] bool marks the ancestors of a row and itself; depth [S] or [n, S] long is the depth of each.
    """
    n, staged = mask.shape
    indices = torch.arange(staged, dtype=torch.int32, device=mask.device).expand(n, -1)
    found = torch.zeros(n, staged + 1, dtype=torch.int32, device=mask.device)
    columns = depth.expand(n, -1).masked_fill(~mask, staged)  # rows that are not seen go to the last column
    return found.scatter_(1, columns, indices)[:, :staged]


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


def append_block(
    length: Tensor, waiting: Tensor, tokens: Tensor, rows: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`append_rows` of `tokens`, before a block of `size` rows that begins with the last token again.

    Returns the slots of all rows [rows], the last token that is not padding [1], and the positions of the block [size].
    """
    if on_triton(length):
        from windfall.kernels.triton.rows import append_block as compiled

        return compiled(length, waiting, tokens, rows, size)
    slots, last, _ = append_rows(length, waiting, rows)
    return slots, tokens.index_select(0, last), length + torch.arange(size, device=length.device)


def embed(
    tokens: Tensor,
    embedding: Tensor,
    positions: Tensor,
    angles: Tensor,
    scale: float = 1.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """scale * embedding[tokens] [n, H] and angles[positions] [n, a]. Positions outside the table use its nearest
    row.

    With `mask` [H] there are more positions than tokens: each token begins a block of rows, whose others are the mask.
    """
    if on_triton(embedding) and embedding.stride(1) == angles.stride(1) == 1:
        from windfall.kernels.triton.rows import embed as compiled

        return compiled(tokens, embedding, positions, angles, scale, mask)
    embedded = F.embedding(tokens, embedding)
    if mask is not None:
        others = mask.to(embedded.dtype).expand(len(tokens), len(positions) // len(tokens) - 1, -1)
        embedded = torch.cat([embedded[:, None], others], 1).flatten(0, 1)
    return embedded if scale == 1 else embedded * scale, angles[positions.clamp(0, len(angles) - 1)]
