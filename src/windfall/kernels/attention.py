"""Attention of a tree's rows over a long static cache, of which only the rows in use are read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton

PART = 256  # keys that are summed up by themselves, where rounding must not depend on the cache's size


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
    positions: Tensor | None = None,  # [n] long, of the rows; committed rows have their slots' numbers
    window: int | None = None,
) -> Tensor:
    """Grouped-query attention of n rows over `length` committed and S staged cache rows → [n, heads, d].

    Nothing past length + S has any influence, and on Triton it is not read. A row that sees nothing gives zeros there.
    Staged rows that a row does not see must still hold finite numbers. On Triton a long cache is split; `last` lets the
    last program to finish combine the parts, which one stream at a time may do, instead of a second kernel. A part has
    `split` keys, a multiple of 128; None: as many as suit the cache's capacity, on which rounding then depends.
    `scale` is positive. `length` must not be what the kernel just before has written: this one may be there before that
    has ended.

    With a `window`, a row sees only keys whose position is less than `window` before its own. This needs `positions`,
    each at least `length`; the staged rows that a row sees must be consecutive positions up to its own, in ascending
    order.
    """
    heads, shared, capacity, staged = queries.shape[1], keys.shape[0], keys.shape[1], mask.shape[1]
    assert heads % shared == 0 and staged <= capacity and keys.shape == values.shape
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    window = None if window is None or window >= capacity else window
    assert window is None or positions is not None
    if window is not None and window < staged:
        mask = newest(mask, window)
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device) if out is None else out
    if on_triton(queries):
        from windfall.kernels.triton.attention import attend

        attend(
            queries, keys, values, length, mask, scale, out, size=split, last=last, positions=positions, window=window
        )
        return out
    return out.copy_(reference(queries, keys, values, length, mask, scale, positions, window))


def newest(mask: Tensor, window: int) -> Tensor:
    """Of the staged rows that each row sees, the last `window`."""
    return mask & (mask.flip(1).cumsum(1).flip(1) <= window)


def reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    mask: Tensor,
    scale: float,
    positions: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """The same with torch: the whole capacity under an explicit mask, so that no shape depends on the length."""
    seen = visible(length, mask, keys.shape[1])
    if positions is not None and window is not None:
        columns = torch.arange(keys.shape[1], device=mask.device)
        seen &= (columns >= length.reshape(1)) | (columns > positions[:, None] - window)
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


def path_attention(
    queries: Tensor,  # [n, heads, d], any strides but d's
    keys: Tensor,  # [kv_heads, capacity, d]
    values: Tensor,  # [kv_heads, capacity, d]
    length: Tensor,  # one integer on the device: committed rows
    reach: Tensor,  # [n] integers: how many keys each row sees, itself included; 0: none, which gives zeros
    lineage: Tensor,  # [n, S] integers: slot, behind the committed rows, of each row's ancestor at each depth
    scale: float | None = None,
) -> Tensor:
    """The same as `tree_attention` for rows that see every committed row, their ancestors and themselves, to the bit
    what each would give behind its own text alone: keys are taken by their positions in the text, not in the cache.
    """
    heads, shared = queries.shape[1], keys.shape[0]
    assert heads % shared == 0 and keys.shape == values.shape
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    if on_triton(queries):
        from windfall.kernels.triton.paths import attend

        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        attend(queries, keys, values, length, reach, lineage, scale, out, PART)
        return out
    return path_reference(queries, keys, values, length, reach, lineage, scale)


def path_reference(
    queries: Tensor, keys: Tensor, values: Tensor, length: Tensor, reach: Tensor, lineage: Tensor, scale: float
) -> Tensor:
    """The same with torch, part by part; sums of products, whose order no shape changes. Parts behind a row's last
    change nothing; all are taken where looking at their number would wait for the device."""
    n, shared = len(queries), keys.shape[0]
    end = keys.shape[1] if reach.is_cuda else int(reach.max())
    wide = torch.promote_types(queries.dtype, torch.float32)
    rows = queries.reshape(n, shared, -1, 1, queries.shape[2]).to(wide)  # [n, kv_heads, group, 1, d]
    top = torch.full(rows.shape[:3], -torch.inf, dtype=wide, device=rows.device)
    total, sums = torch.zeros_like(top), torch.zeros_like(rows[:, :, :, 0])
    for start in range(0, end, PART):
        column, seen = along(length, reach, lineage, start)  # [n, PART]
        column = column.clamp(max=keys.shape[1] - 1)
        unseen = ~seen[:, None, :, None]  # may hold anything, even NaN
        k, v = (x[:, column].transpose(0, 1).to(wide).masked_fill(unseen, 0)[:, :, None] for x in (keys, values))
        scores = ((rows * k).sum(-1) * scale).masked_fill(~seen[:, None, None], -torch.inf)
        higher = torch.maximum(top, scores.amax(-1))
        base = higher.masked_fill(higher == -torch.inf, 0)
        weights, shrink = (scores - base[..., None]).exp(), (top - base).exp()
        total = total * shrink + weights.sum(-1)
        sums = sums * shrink[..., None] + (weights[..., None] * v).sum(-2)
        top = higher
    total = total.masked_fill(total == 0, 1)
    return (sums / total[..., None]).to(queries.dtype).reshape(n, -1, queries.shape[2])


def along(length: Tensor, reach: Tensor, lineage: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Where each row's keys of the positions from `start` on lie, and whether there are any: both [n, PART]."""
    position = start + torch.arange(PART, device=lineage.device).expand(len(lineage), -1)
    staged = position - length.reshape(1)
    above = lineage.gather(1, staged.clamp(0, lineage.shape[1] - 1))
    return torch.where(staged < 0, position, length.reshape(1) + above), position < reach[:, None]


def lineage(mask: Tensor, depth: Tensor) -> Tensor:
    """From which staged rows a row sees ([n, S] bool: its ancestors and itself) and how deep they are ([S] long) to
    [n, S] int32: the one at each depth, 0 where there is none."""
    n, staged = mask.shape
    names = torch.arange(staged, dtype=torch.int32, device=mask.device).expand(n, -1)
    found = torch.zeros(n, staged + 1, dtype=torch.int32, device=mask.device)
    places = depth.expand(n, -1).masked_fill(~mask, staged)  # those unseen all in the last column
    return found.scatter_(1, places, names)[:, :staged]
