"""Attention of a tree's rows over a preallocated KV cache. Only the rows in use are read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton, shared_memory, triton_installed
from windfall.kernels.pages import Pages

PART = 256  # keys per partial sum of `path_reference`


def tree_attention(
    queries: Tensor,  # [n, heads, d], contiguous in d
    keys: Tensor,  # [kv_heads, capacity, d]
    values: Tensor,  # [kv_heads, capacity, d]
    length: Tensor,  # one integer on the device: committed rows, which every row sees
    mask: Tensor,  # [n, S] bool: row i sees the staged row at slot length + j
    scale: float | None = None,
    out: Tensor | None = None,  # [n, heads, d]
    last: bool = True,
    positions: Tensor | None = None,  # [n] long, of the rows; the position of a committed row is its slot
    window: int | None = None,
) -> Tensor:
    """Grouped-query attention of n rows over `length` committed and S staged rows of a KV cache → [n, heads, d].

    Slots from length + S on do not affect the result, and Triton does not read them. With Triton, a row that sees no
    keys gives zeros. Staged rows must hold finite numbers, even those that a row does not see. `scale` is positive.

    Triton splits a long cache into parts. Their size depends on the capacity, and so does rounding. With `last`, the
    last program to finish combines the parts; only one stream at a time may do so. Otherwise a second kernel does.

    The previous kernel on the stream must not write `length`, since this kernel reads it before that one has finished.

    With a `window`, a row sees only keys whose position is less than `window` before its own. This needs `positions`,
    each at least `length`; the staged rows that a row sees must have consecutive positions up to its own, in ascending
    order.
    """
    heads, shared, capacity, staged = queries.shape[1], keys.shape[0], keys.shape[1], mask.shape[1]
    assert heads % shared == 0 and staged <= capacity and keys.shape == values.shape
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    window = None if window is None or window >= capacity else window
    assert window is None or positions is not None
    if window is not None and window < staged:
        mask = limit_to_window(mask, window)
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device) if out is None else out
    if on_triton(queries):
        from windfall.kernels.triton.attention import attend

        attend(queries, keys, values, length, mask, scale, out, last=last, positions=positions, window=window)
        return out
    return out.copy_(reference(queries, keys, values, length, mask, scale, positions, window))


def limit_to_window(mask: Tensor, window: int) -> Tensor:
    """Keep the last `window` of the staged rows that each row sees."""
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
    """`tree_attention` with torch over the whole capacity, with a mask, so that no shape depends on the length."""
    seen = visible(length, mask, keys.shape[1])
    if positions is not None and window is not None:
        columns = torch.arange(keys.shape[1], device=mask.device)
        seen &= (columns >= length.reshape(1)) | (columns > positions[:, None] - window)
    groups = queries.shape[1] // keys.shape[0]
    unseen = ~seen.any(0)[:, None]  # may hold any value, even NaN
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
    queries: Tensor,  # [n, heads, d], contiguous in d
    keys: Tensor,  # [kv_heads, capacity, d]
    values: Tensor,  # [kv_heads, capacity, d]
    length: Tensor,  # one integer on the device: committed rows
    reach: Tensor,  # [n] integers: number of keys each row sees, its own included; 0 gives zeros
    lineage: Tensor | None,  # [n, S] integers: the slot of each row's ancestor at each depth; None: rows are a chain
    scale: float | None = None,
    window: int | None = None,  # keys that a row sees at most, its own included
    cap: float | None = None,  # scores become cap * tanh(score / cap)
    sinks: Tensor | None = None,  # [heads]: the score of a further key of each head, which has no value
    pages: Pages | None = None,  # the requests of the rows; None: there is one, and `length` is that of its text
    first: int = 0,  # keys of earlier positions are not seen
    chunked: bool = False,  # a row sees the keys of its own chunk of `window` positions, not those of a window
) -> Tensor:
    """`tree_attention` for rows that see all committed rows, their ancestors and themselves → [n, heads, d].

    A row's result is bit-identical to that of decoding its path as a plain sequence: keys are summed in the order of
    their positions in the text, not of their slots in the KV cache. In a chain, the slot of a key is its position.

    With `pages`, committed keys lie in the pages of each row's request, and `length` is not read.

    The previous kernel on the stream must not write `length`, `reach` or `lineage`: this kernel reads them before that
    one has finished. Only one stream at a time may run this kernel.
    """
    heads, shared = queries.shape[1], keys.shape[0]
    assert heads % shared == 0 and keys.shape == values.shape
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    if on_triton(queries):
        from windfall.kernels.triton.path_attention import attend

        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        attend(queries, keys, values, length, reach, lineage, scale, out, window, cap, sinks, pages, first, chunked)
        return out
    given = queries, keys, values, length, reach, lineage, scale, window, cap, sinks, pages, first, chunked
    return path_reference(*given)


def fits_pages(width: int, group: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `path_attention` runs with the pages of several requests: for wide heads, a program needs more shared
    memory than some GPUs have. `group`: query heads for each key head."""
    if device.type != "cuda" or dtype == torch.float64 or not triton_installed():
        return True
    from windfall.kernels.triton.path_attention import batch_bytes

    return batch_bytes(group, width, dtype) <= shared_memory(device)


def path_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    reach: Tensor,
    lineage: Tensor | None,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    pages: Pages | None = None,
    first: int = 0,
    chunked: bool = False,
) -> Tensor:
    """`path_attention` with torch, part by part. The order of each sum does not depend on any shape.

    Parts after a row's last key do not change its result. On CUDA all parts are computed, since reading the number of
    keys would synchronize with the device.
    """
    n, shared = len(queries), keys.shape[0]
    end = int(reach.max())
    if reach.is_cuda:
        end = keys.shape[1] if pages is None else pages.positions
    wide = torch.promote_types(queries.dtype, torch.float32)
    rows = queries.reshape(n, shared, -1, 1, queries.shape[2]).to(wide)  # [n, kv_heads, group, 1, d]
    top = torch.full(rows.shape[:3], -torch.inf, dtype=wide, device=rows.device)
    total, sums = torch.zeros_like(top), torch.zeros_like(rows[:, :, :, 0])
    for start in range(0, end, PART):
        k, v, seen = path_keys(keys, values, length, reach, lineage, start, window, pages, first, chunked)
        scores = (rows * k.to(wide)).sum(-1) * scale
        scores = scores if cap is None else cap * (scores / cap).tanh()
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        higher = torch.maximum(top, scores.amax(-1))
        base = higher.masked_fill(higher == -torch.inf, 0)
        weights, shrink = (scores - base[..., None]).exp(), (top - base).exp()
        total = total * shrink + weights.sum(-1)
        sums = sums * shrink[..., None] + (weights[..., None] * v.to(wide)).sum(-2)
        top = higher
    if sinks is not None:
        sink = sinks.to(wide).view(1, shared, -1).expand_as(top)
        higher = torch.maximum(top, sink)
        total, sums = total * (top - higher).exp() + (sink - higher).exp(), sums * (top - higher).exp()[..., None]
    total = total.masked_fill(total == 0, 1)
    return (sums / total[..., None]).to(queries.dtype).reshape(n, -1, queries.shape[2])


def oldest_seen(reach: Tensor, window: int, chunked: bool) -> Tensor:
    """The first position that each row's window, or its chunk, contains; `reach` is 1 more than the row's position."""
    return (reach - 1) // window * window if chunked else reach - window


def path_keys(
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    reach: Tensor,
    lineage: Tensor | None,
    start: int,
    window: int | None,
    pages: Pages | None = None,
    first: int = 0,
    chunked: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of positions start, start + 1, ... [n or 1, kv_heads, 1, PART, d]; which the rows see [n, PART].

    Those that no row sees are 0, since they may hold any value, even NaN.
    """
    position = start + torch.arange(PART, device=reach.device)
    seen = (position < reach[:, None]) & (position >= first)
    if window is not None:
        seen &= position[None] >= oldest_seen(reach, window, chunked)[:, None]
    committed, last = position, keys.shape[1] - 1
    if pages is not None:
        length = pages.lengths[pages.owners.long()][:, None]
        owners = pages.owners[:, None].expand(-1, PART)
        committed = pages.slots(owners, position.expand(len(reach), -1))
    if lineage is None and pages is None:  # all rows have the same keys
        column, unseen = position.clamp(max=last)[None], ~seen.any(0)[None]
    elif lineage is None:
        column, unseen = committed.clamp(max=last), ~seen
    else:
        staged = (position - length).expand(len(reach), -1)
        column = lineage.gather(1, staged.clamp(0, lineage.shape[1] - 1)).long()
        column, unseen = torch.where(staged < 0, committed, column).clamp(max=last), ~seen
    k, v = (x[:, column].transpose(0, 1).masked_fill(unseen[:, None, :, None], 0)[:, :, None] for x in (keys, values))
    return k, v, seen
