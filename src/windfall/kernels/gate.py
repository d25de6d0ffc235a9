"""Drop the children beyond the breadth that the drafter's confidence allows their parent."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton
from windfall.kernels.trees import TreeArrays


def prune(
    tree: TreeArrays,
    nodes: Tensor,  # [w] long: the nodes that were just expanded; NO_NODE: an empty row
    values: Tensor,  # [w, k] fp32, written: log-probabilities of their children, the likeliest first
    bounds: Tensor,  # [9] fp32: the numbers of policies.plan.Bounds
) -> None:
    """Give children that are out of bounds a log-probability of -inf, which makes them empty places of the tree."""
    if on_triton(values):
        from windfall.kernels.triton.gate import prune as run
    else:
        run = reference
    run(tree, nodes, values, bounds)


def reference(tree: TreeArrays, nodes: Tensor, values: Tensor, bounds: Tensor) -> None:
    sure, unsure, narrow, middle, wide, first = bounds[3:]
    root, confidence = tree.depth[nodes.clamp(min=0)] == 0, values[:, 0].exp()
    breadth = torch.where(confidence < unsure, wide, torch.where(confidence >= sure, narrow, middle))
    breadth = torch.where(root, torch.minimum(breadth, first), breadth)
    ranks = torch.arange(values.shape[1], device=values.device)
    values.masked_fill_(ranks >= breadth[:, None], -math.inf)
