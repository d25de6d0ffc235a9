"""Where the keys and values of several requests lie: in pages of the KV cache that a table for each request lists."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PAGE_TOKENS = 64  # KV rows of a page; attention reads no longer block of keys at once
UNUSED_PAGE = 0  # of the KV cache: rows that no text needs are written there
TILE_QUERIES = 16  # query rows of an attention tile: the fewest of a matrix product


class Pages(NamedTuple):
    """The requests of a pass. The rows of a request are adjacent."""

    owners: Tensor  # [n] int32: the request of each row; any for padding
    lengths: Tensor  # [R] long: committed rows of each request
    tables: Tensor  # [R, P] int32: the page of each PAGE_TOKENS positions
    tiles: Tensor | None = None  # [T + 1] int32, see `tiles_of`; None: all rows are of one request

    @property
    def positions(self) -> int:
        """An upper bound on the length of a text."""
        return self.tables.shape[1] * PAGE_TOKENS

    def slots(self, owners: Tensor, positions: Tensor) -> Tensor:
        """The slots of these committed positions of these requests; both have the same shape."""
        last = self.tables.shape[1] - 1
        page = self.tables[owners.long(), (positions // PAGE_TOKENS).clamp(max=last)].long()
        return page * PAGE_TOKENS + positions % PAGE_TOKENS


def pages_for(tokens: int) -> int:
    """Pages that a text of this length needs."""
    return -(-tokens // PAGE_TOKENS)


def tile_rows(group: int) -> int:
    """Rows of an attention tile, for this number of query heads for each key head."""
    return max(TILE_QUERIES // group, 1)


def tiles_of(owners: Tensor, rows: int, tiles: int) -> Tensor:
    """The first row of each attention tile [tiles + 1]; a tile has at most `rows` rows, all of one request.

    Tiles after the last row are empty. owners [n]: the request of each row; those of a request are adjacent.
    """
    n = len(owners)
    row = torch.arange(n, device=owners.device)
    begins = torch.ones(n, dtype=torch.bool, device=owners.device)
    begins[1:] = owners[1:] != owners[:-1]
    since = row - torch.where(begins, row, 0).cummax(0).values  # rows of the same request before each row
    first = since % rows == 0
    made = torch.full((tiles + 1,), n, dtype=torch.int32, device=owners.device)
    places = torch.where(first, first.cumsum(0) - 1, tiles)
    return made.scatter_(0, places, torch.where(first, row, n).int())


def max_tiles(n: int, requests: int, rows: int) -> int:
    """The largest number of tiles of n rows of this number of requests."""
    return min(n, requests + n // rows)
