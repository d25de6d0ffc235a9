"""The rows of a verify pass: the best nodes of the tree in ascending order, with their parents and ancestors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton
from windfall.kernels.grow import sees
from windfall.kernels.trees import NO_NODE, TreeArrays

MAX_VERIFY_ROWS = 320


def choose(
    tree: TreeArrays,
    rows: int,
    kept: Tensor,  # [≥ rows] long, written, like all that follow: the nodes, ascending, then NO_NODE
    tokens: Tensor,  # [≥ rows] long, 0 for padding
    parents: Tensor,  # [≥ rows] long: the parent's row, 0 for the root and padding
    depth: Tensor,  # [≥ rows] long, 0 for padding
    mask: Tensor,  # [rows, rows] bool, any row stride: each row's ancestors and itself, none for padding
    count: Tensor,  # [1] long: rows that are not padding
    limit: Tensor | None = None,  # [1] long: choose only among entries before this one
) -> None:
    """Choose the `rows` nodes with the highest keys; the lower index wins ties."""
    assert 0 < rows <= MAX_VERIFY_ROWS and mask.shape == (rows, rows)
    if on_triton(kept):
        from windfall.kernels.triton.choose import choose as compiled

        compiled(tree, rows, kept, tokens, parents, depth, mask, count, limit)
    else:
        reference(tree, rows, kept, tokens, parents, depth, mask, count, limit)


def reference(
    tree: TreeArrays,
    rows: int,
    kept: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depth: Tensor,
    mask: Tensor,
    count: Tensor,
    limit: Tensor | None = None,
) -> None:
    """`choose` with torch."""
    places = torch.arange(len(tree.key), device=kept.device)
    eligible = places < tree.count
    if limit is not None:
        eligible &= places < limit
    values, order = torch.where(eligible, tree.key, -math.inf).sort(descending=True, stable=True)
    far = len(places)
    best = torch.where(values > -math.inf, order, far)[:rows].sort().values
    live = best < far
    kept[:rows] = NO_NODE
    kept[: len(best)] = torch.where(live, best, NO_NODE)
    nodes = kept[:rows]
    real, live = nodes.clamp(min=0), nodes >= 0
    tokens[:rows] = torch.where(live, tree.tokens[real], 0)
    depth[:rows] = torch.where(live, tree.depth[real], 0)
    above = torch.where(live, tree.parents[real], NO_NODE)
    parents[:rows] = ((above[:, None] == nodes) & (above >= 0)[:, None]).long().argmax(1)  # 0 where there is none
    mask.copy_(sees(tree, nodes, nodes))
    count.copy_(live.sum())
