"""Checks of attention over pages: each row of a batch has the bits that it has alone in a cache of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.trees import random_tree
from windfall.engine.gpu.batch.state import ALL_COMMITTED
from windfall.kernels import path_attention
from windfall.kernels.pages import PAGE_TOKENS, Pages, max_tiles, tile_rows, tiles_of
from windfall.kernels.rows import ancestors


def check_pages(
    lengths: list[int],
    rows: list[int],
    trees: bool,
    dtype: torch.dtype,
    device: str = "cpu",
    prompts: tuple[int, ...] = (),
    heads: int = 6,
    staged: bool = True,
    **options: Any,
) -> None:
    """Requests with these committed lengths have these numbers of rows each: trees, or chains.

    `prompts`: requests whose rows are chains in any case, and count as committed. `heads` of queries; two have keys.
    `staged`: rows of trees lie after all pages, and not in the pages of their request.
    """
    torch.manual_seed(sum(lengths))
    shared, width, padding = 2, 16, 3
    requests, total = len(lengths), sum(rows)
    wide = max(-(-(length + n) // PAGE_TOKENS) for length, n in zip(lengths, rows, strict=True))
    pages = torch.randperm(requests * wide + 2)[: requests * wide].view(requests, wide).int()
    staging = (requests * wide + 2) * PAGE_TOKENS  # the first slot of staged rows
    cache = torch.full((2, shared, staging + total, width), torch.nan).to(dtype)
    queries = torch.randn(total + padding, heads, width).to(dtype)
    owners, reach, lineage = (torch.zeros(total + padding, dtype=torch.long) for _ in range(3))
    lineage = torch.zeros(total + padding, max(rows), dtype=torch.int32)
    alone, row = [], 0
    for owner, (length, n) in enumerate(zip(lengths, rows, strict=True)):
        own, tree = torch.randn(2, shared, length + n, width).to(dtype), random_tree(n, seed=n)
        branches = trees and owner not in prompts
        depth, mask = torch.arange(n), torch.ones(n, n).tril() > 0
        if branches:  # depth first, so that later rows may be less deep
            order = torch.tensor(sorted(range(n), key=lambda node: tree.mask()[node].nonzero().flatten().tolist()))
            depth, mask = tree.depth[order], tree.mask()[order][:, order]
        there = pages[owner].long()[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)
        places = there.flatten()[: length + n]
        if branches:
            if staged:
                places = torch.cat([places[:length], staging + row + torch.arange(n)])
            path, level = ancestors(mask, depth), torch.arange(n)
            others = (depth == level[:, None]).int().argmax(1)  # a row of each depth, if there is one
            path = torch.where(level <= depth[:, None], path, others)  # entries beyond a row's depth mean nothing
            lineage[row : row + n, :n] = places[length + path]
        cache[:, :, places] = own
        owners[row : row + n], reach[row : row + n] = owner, length + depth + 1
        lines = length + ancestors(mask, depth) if branches else None
        given = (x.to(device) for x in (queries[row : row + n], *own, torch.tensor([length]), length + depth + 1))
        alone.append(path_attention(*given, None if lines is None else lines.to(device), **options))
        row += n
    most = tile_rows(heads // shared)
    tiles = tiles_of(owners, most, max_tiles(len(owners), requests + 1, most))
    known = [ALL_COMMITTED if owner in prompts else length for owner, length in enumerate(lengths)]
    batch = Pages(owners.int(), torch.tensor(known), pages, tiles)
    made = attend(queries, cache, reach, lineage if trees else None, batch, device, options)
    assert torch.equal(made[:total], torch.cat(alone)) and not made[total:].any()
    if requests == 1:
        made = attend(queries, cache, reach, lineage if trees else None, batch._replace(tiles=None), device, options)
        assert torch.equal(made[:total], torch.cat(alone)) and not made[total:].any()


def attend(
    queries: Tensor,
    cache: Tensor,
    reach: Tensor,
    lineage: Tensor | None,
    batch: Pages,
    device: str,
    options: dict[str, Any],
) -> Tensor:
    there = Pages(*(None if x is None else x.to(device) for x in batch))  # type: ignore[arg-type]
    given = (x.to(device) for x in (queries, *cache, torch.zeros(1, dtype=torch.long), reach))
    return path_attention(*given, None if lineage is None else lineage.to(device), **options, pages=there)
