"""Attention of many blocks at once: those of all anchors of a batch of texts, each as in decoding.

A row sees the text before its anchor and rows of its own block. Both are intervals of columns, if the texts and then
the blocks are laid out one after the other. On a GPU `PackedBlocks` attends over this layout with FlexAttention, which
skips what no row sees. `DenseBlocks` uses explicit masks, text by text.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from windfall.heads.block import BlockConfig, Visibility, block_mask
from windfall.heads.layers import ContextMemory, masked_attention
from windfall.train.batch import Rows

TILE = 128  # rows and columns of a tile of FlexAttention
MAX_SIZES = 64  # that FlexAttention may be compiled for
MAX_BLOCKS = 32  # of a text whose dense mask exists at a time


class Blocks(NamedTuple):
    """Which blocks are trained, by text and position."""

    texts: Tensor  # [N] rows of the batch, ascending
    starts: Tensor  # [N] positions of the anchors, ascending within a text
    counts: list[int]  # of each text

    @classmethod
    def where(cls, anchors: Tensor, device: torch.device) -> Blocks:
        """Those that begin where a mask [b, n] on the host is true, on the device."""
        return cls(*Rows.where(anchors, device), anchors.sum(1).tolist())

    def positions(self, size: int) -> Tensor:
        """[N, size], of the rows."""
        return self.starts[:, None] + torch.arange(size, device=self.starts.device)


def new_memory(config: BlockConfig, blocks: Blocks, sizes: PaddedSizes) -> ContextMemory:
    """The memory that suits the device and the head."""
    dim = config.layer.head_dim
    if blocks.texts.is_cuda and dim >= 16 and dim & (dim - 1) == 0:
        return PackedBlocks(config, blocks, sizes)
    return DenseBlocks(config, blocks)


class _TextKeys:
    """Keys and values of the texts, by layer: [B, kv_heads, n, d]."""

    def __init__(self, config: BlockConfig, blocks: Blocks):
        self.config, self.blocks = config, blocks
        self.texts: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.texts[layer] = keys, values


class DenseBlocks(_TextKeys):
    """Explicit masks, of some blocks of a text at a time."""

    def __init__(self, config: BlockConfig, blocks: Blocks):
        super().__init__(config, blocks)
        self._parts: list[tuple[int, slice]] = []  # text, blocks
        start = 0
        for text, count in enumerate(blocks.counts):
            for first in range(start, start + count, MAX_BLOCKS):
                self._parts.append((text, slice(first, min(first + MAX_BLOCKS, start + count))))
            start += count

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries [N, heads, rows, d], keys and values [N, kv_heads, rows, d] → [N, heads, rows, d]."""
        rows, visible, found = queries.shape[2], self.config.visibility(layer), []
        for text, part in self._parts:
            past = tuple(x[text : text + 1] for x in self.texts[layer])
            own = tuple(_together(x[part]) for x in (keys, values))
            seen_keys, seen_values = (torch.cat(pair, 2) for pair in zip(past, own, strict=True))
            columns = torch.arange(past[0].shape[2], device=queries.device)[None]
            mask = block_mask(columns, self.blocks.starts[None, part], rows, visible)
            out = masked_attention(_together(queries[part]), seen_keys, seen_values, mask)
            found.append(_apart(out, rows))
        return torch.cat(found) if found else torch.zeros_like(queries)


class PaddedSizes:
    """The padded numbers of columns and rows. They only grow, in large steps, because each pair is compiled for.

    `share` of the columns are expected to begin a block, so that the number of rows follows from that of columns.
    """

    def __init__(self, share: float = 1.0) -> None:
        self.share, self.columns, self.rows = share, 0, 0

    def grow(self, columns: int, blocks: int, size: int) -> tuple[int, int]:
        """The sizes for this many columns, and blocks of `size` rows."""
        self.columns = max(self.columns, round_up(columns))
        self.rows = max(self.rows, round_up(max(blocks, math.ceil(self.share * self.columns)) * size))
        return self.columns, self.rows


def round_up(size: int) -> int:
    """The next multiple of TILE and of an eighth of a power of two."""
    step = max(TILE, (1 << (max(size, 1) - 1).bit_length()) // 8)
    return -(-max(size, 1) // step) * step


class PackedBlocks(_TextKeys):
    """All texts and all blocks as one sequence."""

    def __init__(self, config: BlockConfig, blocks: Blocks, sizes: PaddedSizes):
        super().__init__(config, blocks)
        self._sizes, self._masks = sizes, dict[Visibility, BlockMask]()

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """As in `DenseBlocks`."""
        rows, past = queries.shape[2], self.texts[layer]
        length = past[0].shape[2]
        columns, most = self._sizes.grow(len(past[0]) * length, len(queries), rows)
        visible = self.config.visibility(layer)
        if visible not in self._masks:
            self._masks[visible] = packed_mask(self.blocks, length, rows, (columns, most), visible)
        seen = [
            torch.cat([_padded(_together(text), columns), _padded(_together(own), most)], 2)
            for text, own in zip(past, (keys, values), strict=True)
        ]
        given = (_padded(_together(queries), most), *seen)
        if torch.is_autocast_enabled(queries.device.type):
            given = tuple(x.to(torch.get_autocast_dtype(queries.device.type)) for x in given)
        attention = _compiled() if queries.is_cuda else flex_attention
        out: Tensor = attention(*given, block_mask=self._masks[visible], enable_gqa=True)
        return _apart(out[:, :, : len(queries) * rows], rows)


def packed_mask(blocks: Blocks, length: int, rows: int, sizes: tuple[int, int], visible: Visibility) -> BlockMask:
    """The mask of all blocks: `sizes[1]` rows, and as columns `sizes[0]` of texts of this length, then the rows.

    Rows of padding see the block of padding that they lie in.
    """
    columns, most = sizes
    first, last = _text_columns(blocks, length, rows, most, visible)
    begin, end = _own_columns(rows, columns, most, visible, first.device)

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        text = (column >= first[row]) & (column < last[row])
        own = (column >= begin[row]) & (column < end[row])
        return text | own

    some, whole = tiles([(first, last), (begin, end)], (columns + most) // TILE)
    lists = *_listed(some & ~whole), *_listed(whole)
    return BlockMask.from_kv_blocks(*lists, TILE, sees, (most, columns + most))


def _text_columns(blocks: Blocks, length: int, rows: int, most: int, visible: Visibility) -> tuple[Tensor, Tensor]:
    """The first column of the text that each row sees and the one after the last: [most] each; padding: both 0."""
    start = (blocks.texts * length)[:, None]
    last = (start + blocks.starts[:, None]).expand(-1, rows)
    first = start.expand(-1, rows)
    if visible.window is not None:
        ends = blocks.starts[:, None] if visible.anchor_window else blocks.positions(rows) + 1
        first = start + (ends - visible.window).clamp(min=0).expand(-1, rows)
    used = len(blocks.texts) * rows
    return _flat(first, most - used), _flat(last, most - used)


def _own_columns(
    rows: int, columns: int, most: int, visible: Visibility, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The same for rows of the block."""
    places = torch.arange(most, dtype=torch.int32, device=device)
    begin = places // rows * rows
    end = begin + rows if visible.bidirectional else places + 1
    if visible.window is not None and not visible.anchor_window:
        begin, end = torch.maximum(begin, places - visible.window + 1), torch.minimum(end, places + visible.window)
    return begin + columns, end + columns


def _flat(x: Tensor, padding: int) -> Tensor:
    return F.pad(x.int().flatten(), (0, padding))


def tiles(intervals: list[tuple[Tensor, Tensor]], count: int) -> tuple[Tensor, Tensor]:
    """Which of `count` tiles of columns some rows of a tile of rows may see, and which all of them see entirely.

    Each row sees these intervals of columns. Both results are [tiles of rows, count] bool. Intervals of a tile of rows
    count as one from the first to the last column, which is exact if they overlap or touch.
    """
    edges = torch.arange(count, device=intervals[0][0].device) * TILE
    some = whole = torch.zeros((), dtype=torch.bool, device=edges.device)
    for first, last in intervals:
        empty = first >= last
        low = first.masked_fill(empty, count * TILE).view(-1, TILE)
        high = last.masked_fill(empty, 0).view(-1, TILE)
        some = some | ((low.amin(1)[:, None] < edges + TILE) & (high.amax(1)[:, None] > edges))
        whole = whole | ((low.amax(1)[:, None] <= edges) & (high.amin(1)[:, None] >= edges + TILE))
    return some, whole


def _listed(given: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] bool → the number of true columns [1, 1, rows], and all columns, the true ones first."""
    order = given.int().argsort(dim=1, descending=True, stable=True)
    return given.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]


@cache
def _compiled() -> Any:
    """Compiled for fixed sizes; without its kernel the scores of all rows and columns would be in memory."""
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return torch._dynamo.config.patch(recompile_limit=MAX_SIZES)(compiled)


def _together(x: Tensor) -> Tensor:
    """[N, heads, rows, d] → [1, heads, N * rows, d]"""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _apart(x: Tensor, rows: int) -> Tensor:
    """[1, heads, N * rows, d] → [N, heads, rows, d]"""
    return x[0].reshape(x.shape[1], -1, rows, x.shape[3]).transpose(0, 1)


def _padded(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, 0, 0, size - x.shape[2]))
