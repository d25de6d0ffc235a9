"""Drop drafted children before they join the tree: those of nodes that must not be expanded, and those beyond the
maximum number of children of their parent."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton
from windfall.kernels.trees import TreeArrays


class Bounds(NamedTuple):
    """Which nodes have children, and how many; the device has them as one array of numbers."""

    floor: float  # a node with a lower score has none
    ordinary: float  # nor has one of this depth, or deeper, unless its score is above `deep`
    deep: float
    sure: float  # after a node whose likeliest child has this probability at least, it has `narrow` ...
    unsure: float  # ... below this one `wide`, else `middle`
    narrow: int
    middle: int
    wide: int
    first: int  # of the root, at the most; it always has some


def prune(
    tree: TreeArrays,
    nodes: Tensor,  # [w] long, just expanded, NO_NODE for an empty row
    values: Tensor,  # [w, k] fp32, written: log-probabilities of their children, the likeliest first
    bounds: Tensor,  # [9] fp32, see Bounds
) -> None:
    """Set the log-probability of children that are out of bounds to -inf, which makes them empty entries."""
    if on_triton(values):
        from windfall.kernels.triton.gate import prune as run
    else:
        run = reference
    run(tree, nodes, values, bounds)


def reference(tree: TreeArrays, nodes: Tensor, values: Tensor, bounds: Tensor) -> None:
    floor, ordinary, deep, sure, unsure, narrow, middle, wide, first = bounds
    parent = nodes.clamp(min=0)
    depth, score, confidence = tree.depth[parent], tree.score[parent], values[:, 0].exp()
    root = depth == 0
    stays = (nodes >= 0) & (root | ((score >= floor) & ((depth < ordinary) | (score > deep))))
    breadth = torch.where(confidence < unsure, wide, torch.where(confidence >= sure, narrow, middle))
    breadth = torch.where(root, torch.minimum(breadth, first), breadth)
    ranks = torch.arange(values.shape[1], device=values.device)
    values.masked_fill_(~(stays[:, None] & (ranks < breadth[:, None])), -math.inf)
