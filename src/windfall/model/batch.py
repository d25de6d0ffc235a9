"""Pack the rows of several sequences into one padded forward pass, and unpack its outputs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from windfall.core.tree import DraftTree


class Rows(NamedTuple):
    """The rows of one sequence in a pass. Staged rows of earlier passes of this cycle come first in `visible`."""

    tokens: Tensor  # [n] long
    positions: Tensor  # [n] long
    visible: Tensor  # [n, staged + n] bool: which staged and new rows each new row attends to, itself included

    @classmethod
    def chain(cls, tokens: list[int], start: int, staged: int = 0) -> Rows:
        """Consecutive tokens from position `start` on; each sees the ones before it."""
        size = len(tokens)
        visible = torch.cat([torch.zeros(size, staged, dtype=torch.bool), torch.ones(size, size).tril().bool()], 1)
        return cls(torch.tensor(tokens, dtype=torch.long), start + torch.arange(size), visible)

    @classmethod
    def branch(cls, tree: DraftTree, nodes: Tensor, slots: dict[int, int], stem: range, root: int, staged: int) -> Rows:
        """Unexpanded nodes of a tree whose expanded nodes are in staged rows (`slots`); each sees its ancestors.

        `stem` are the staged rows before the root's, `root` is the root's position.
        """
        size = len(nodes)
        visible = np.zeros((size, staged + size), dtype=bool)
        visible[:, stem.start : stem.stop] = True
        visible[:, staged:] = np.eye(size, dtype=bool)
        places, parents = np.full(len(tree), -1), tree.arrays.parents
        places[list(slots)] = list(slots.values())
        rows, above = np.arange(size), parents[nodes.numpy()]
        while len(rows := rows[above >= 0]):  # level by level towards the root: a mask of all nodes would be large
            above = above[above >= 0]
            visible[rows, places[above]] |= places[above] >= 0
            above = parents[above]
        return cls(tree.tokens[nodes], root + tree.depth[nodes], torch.from_numpy(visible))


class Packed(NamedTuple):
    """One padded forward for B sequences."""

    tokens: Tensor  # [B, n]
    positions: Tensor  # [B, n]
    mask: Tensor  # [B, n, top + staged + n] bool


def pack(rows: list[Rows], lengths: list[int], staged: int, device: torch.device) -> Packed:
    """Pad to the longest sequence; a padding row sees the prefix and itself, and no real row sees it."""
    if len(rows) == 1:
        return _alone(rows[0], lengths[0], device)
    batch, width, top = len(rows), max(len(r.tokens) for r in rows), max(lengths)
    tokens = torch.zeros(batch, width, dtype=torch.long)
    positions = torch.zeros(batch, width, dtype=torch.long)
    fresh = torch.eye(width, dtype=torch.bool).repeat(batch, 1, 1)
    fresh = torch.cat([torch.zeros(batch, width, staged, dtype=torch.bool), fresh], 2)  # [B, n, staged + n]
    for b, row in enumerate(rows):
        size = len(row.tokens)
        tokens[b, :size] = row.tokens
        positions[b, :size] = row.positions
        fresh[b, :size, : staged + size] = row.visible
    committed = torch.arange(top) < torch.tensor(lengths)[:, None]  # [B, top]
    committed = committed.to(device)[:, None].expand(batch, width, top)
    return Packed(tokens.to(device), positions.to(device), torch.cat([committed, fresh.to(device)], 2))


def _alone(row: Rows, length: int, device: torch.device) -> Packed:
    """`pack` for one sequence, without padding."""
    committed = torch.ones(len(row.tokens), length, dtype=torch.bool, device=device)
    mask = torch.cat([committed, row.visible.to(device)], 1)
    return Packed(row.tokens[None].to(device), row.positions[None].to(device), mask[None])


def unpack(padded: Tensor, rows: list[Rows]) -> list[Tensor]:
    """[B, n, ...] → each sequence's own rows."""
    return [padded[b, : len(row.tokens)] for b, row in enumerate(rows)]
