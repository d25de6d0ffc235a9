"""The rows of a verify pass: the best nodes of the whole tree, in their order, with their parents and ancestors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton
from windfall.kernels.grow import sees
from windfall.kernels.trees import NOBODY, TreeArrays

MOST = 320  # rows


def choose(
    tree: TreeArrays,
    rows: int,
    kept: Tensor,  # [≥ rows] long, written as are all that follow: the nodes, ascending, NOBODY behind them
    tokens: Tensor,  # [≥ rows] long, padding 0
    parents: Tensor,  # [≥ rows] long: as rows, 0 for the root and padding
    depth: Tensor,  # [≥ rows] long, padding 0
    mask: Tensor,  # [rows, rows] bool, any row stride: each row's ancestors and itself, nothing for padding
    count: Tensor,  # [1] long: rows that are not padding
    limit: Tensor | None = None,  # [1] long: only the places before this one
) -> None:
    """The `rows` places of the highest key, ties to the lower index."""
    assert 0 < rows <= MOST and mask.shape == (rows, rows)
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
    places = torch.arange(len(tree.key), device=kept.device)
    eligible = places < tree.count
    if limit is not None:
        eligible &= places < limit
    values, order = torch.where(eligible, tree.key, -math.inf).sort(descending=True, stable=True)
    far = len(places)
    best = torch.where(values > -math.inf, order, far)[:rows].sort().values
    live = best < far
    kept[:rows] = NOBODY
    kept[: len(best)] = torch.where(live, best, NOBODY)
    nodes = kept[:rows]
    real, live = nodes.clamp(min=0), nodes >= 0
    tokens[:rows] = torch.where(live, tree.tokens[real], 0)
    depth[:rows] = torch.where(live, tree.depth[real], 0)
    above = torch.where(live, tree.parents[real], NOBODY)
    parents[:rows] = ((above[:, None] == nodes) & (above >= 0)[:, None]).long().argmax(1)  # 0 where there is none
    mask.copy_(sees(tree, nodes, nodes))
    count.copy_(live.sum())
