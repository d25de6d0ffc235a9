"""Attention of a tree's rows over a long static cache, of which only the rows in use are read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton


def tree_attention(
    queries: Tensor,  # [n, heads, d], any strides but d's
    keys: Tensor,  # [kv_heads, capacity, d]
    values: Tensor,  # [kv_heads, capacity, d]
    length: Tensor,  # one integer on the device: committed rows, seen by all
    mask: Tensor,  # [n, S] bool: row i sees the staged row at slot length + j
    scale: float | None = None,
    out: Tensor | None = None,  # [n, heads, d]
    last: bool = True,
    split: int | None = None,
) -> Tensor:
    """Grouped-query attention of n rows over `length` committed and S staged cache rows → [n, heads, d].

    Nothing past length + S has any influence, and on Triton it is not read. A row that sees nothing gives zeros there.
    Staged rows that a row does not see must still hold finite numbers. On Triton a long cache is split; `last` lets the
    last program to finish combine the parts, which one stream at a time may do, instead of a second kernel. A part has
    `split` keys, a multiple of 128; None: as many as suit the cache's capacity, on which rounding then depends.
    """
    heads, shared, capacity, staged = queries.shape[1], keys.shape[0], keys.shape[1], mask.shape[1]
    assert heads % shared == 0 and staged <= capacity and keys.shape == values.shape
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device) if out is None else out
    if on_triton(queries):
        from windfall.kernels.jit.attention import attend

        attend(queries, keys, values, length, mask, scale, out, size=split, last=last)
        return out
    return out.copy_(reference(queries, keys, values, length, mask, scale))


def reference(queries: Tensor, keys: Tensor, values: Tensor, length: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same with torch: the whole capacity under an explicit mask, so that no shape depends on the length."""
    seen = visible(length, mask, keys.shape[1])
    groups = queries.shape[1] // keys.shape[0]
    unseen = ~seen.any(0)[:, None]  # may hold anything, even NaN
    keys, values = (x.masked_fill(unseen, 0).repeat_interleave(groups, 0)[None] for x in (keys, values))
    rows = queries.transpose(0, 1)[None]  # [1, heads, n, d]
    return F.scaled_dot_product_attention(rows, keys, values, seen, scale=scale)[0].transpose(0, 1)


def visible(length: Tensor, mask: Tensor, capacity: int) -> Tensor:
    """[n, capacity] bool: which cache rows each row sees."""
    columns = torch.arange(capacity, device=mask.device)
    staged = columns - length.reshape(1)
    inside = (staged >= 0) & (staged < mask.shape[1])
    return (staged < 0) | (inside & mask[:, staged.clamp(0, mask.shape[1] - 1)])
