"""One program. Each thread writes only values that it has read."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.kernels.backend import power_of_two
from windfall.kernels.trees import TreeArrays


@triton.jit
def _prune(
    nodes,
    values,
    all_depth,
    bounds,
    GIVEN: tl.constexpr,
    K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.arange(0, BLOCK_W)
    column = tl.arange(0, BLOCK_K)
    inside = (row < GIVEN)[:, None] & (column < K)[None, :]
    cells = values + row[:, None] * K + column[None, :]
    own = tl.load(cells, mask=inside, other=float("-inf"))
    node = tl.load(nodes + row, mask=row < GIVEN, other=-1).to(tl.int32)
    root = tl.load(all_depth + tl.maximum(node, 0)) == 0
    confidence = tl.exp(tl.max(own, 1))  # of the first
    breadth = tl.where(confidence >= tl.load(bounds + 3), tl.load(bounds + 5), tl.load(bounds + 6))
    breadth = tl.where(confidence < tl.load(bounds + 4), tl.load(bounds + 7), breadth)
    breadth = tl.where(root, tl.minimum(breadth, tl.load(bounds + 8)), breadth)
    wanted = column.to(tl.float32)[None, :] < breadth[:, None]
    tl.store(cells, tl.where(wanted, own, float("-inf")), mask=inside)


def prune(tree: TreeArrays, nodes: Tensor, values: Tensor, bounds: Tensor) -> None:
    """See `kernels.gate.reference`."""
    width, k = values.shape
    assert values.dtype == bounds.dtype == torch.float32
    assert all(x.is_contiguous() for x in (nodes, values, bounds, tree.depth))
    _prune[(1,)](
        nodes,
        values,
        tree.depth,
        bounds,
        GIVEN=width,
        K=k,
        BLOCK_W=power_of_two(width),
        BLOCK_K=power_of_two(k),
        num_warps=1 if width * k <= 128 else 4,
    )
