"""Prefill passes over the prompts of several requests: their tokens, and the slots of their keys and values."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from windfall.engine.gpu.forward import Pass, Paths
from windfall.engine.gpu.target import PREFILL_CHUNK_TOKENS, PREFILL_SIZES
from windfall.engine.gpu.transfer import QueuedBuffer
from windfall.kernels.batch_rows import BatchRows
from windfall.kernels.pages import PAGE_TOKENS, UNUSED_PAGE, Pages, max_tiles

Integers = NDArray[np.int64]


class Prompt(NamedTuple):
    """A text to process, from position `start` on, except for its last token."""

    seat: int
    tokens: list[int]
    pages: list[int]
    start: int  # tokens before it are in the KV cache


class Part(NamedTuple):
    """Consecutive tokens of a prompt, which are consecutive rows of a pass."""

    prompt: Prompt
    start: int  # position of the first
    end: int
    row: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.end - self.start)


class Chunk(NamedTuple):
    """The rows of one pass."""

    parts: list[Part]
    rows: int  # that are not padding
    size: int

    @property
    def alone(self) -> bool:
        """Whether all rows are of one request."""
        return len(self.parts) == 1


class PromptQueue:
    """Prompts that wait for their prefill, in the order in which they came."""

    def __init__(self) -> None:
        self._prompts: list[Prompt] = []
        self._at: dict[int, int] = {}  # seat → position up to which the prompt is processed

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def left(self) -> int:
        """Tokens that are not processed yet."""
        return sum(len(prompt.tokens) - 1 - self._at[prompt.seat] for prompt in self._prompts)

    def add(self, prompt: Prompt) -> None:
        self._prompts.append(prompt)
        self._at[prompt.seat] = prompt.start

    def remove(self, seat: int) -> None:
        """Drop the prompt at this seat."""
        self._prompts = [prompt for prompt in self._prompts if prompt.seat != seat]
        self._at.pop(seat, None)

    def take(self, most: int = PREFILL_CHUNK_TOKENS) -> tuple[Chunk | None, list[Prompt]]:
        """The next chunk of at most this number of rows, if there is any, and the prompts that end with it."""
        parts: list[Part] = []
        ended: list[Prompt] = []
        row = 0
        for prompt in self._prompts:
            at, end = self._at[prompt.seat], len(prompt.tokens) - 1
            until = min(end, at + most - row)
            if at < until:
                parts.append(Part(prompt, at, until, row))
            row, self._at[prompt.seat] = row + until - at, until
            if until < end:
                break
            ended.append(prompt)
        for prompt in ended:
            self.remove(prompt.seat)
        return (_chunk(parts, row) if parts else None), ended


def _chunk(parts: list[Part], rows: int) -> Chunk:
    return Chunk(parts, rows, PREFILL_SIZES[bisect_left(PREFILL_SIZES, rows)])


class ChunkBuffers:
    """The rows of a prefill pass in fixed buffers."""

    def __init__(self, device: torch.device, seats: int, tile_rows: int):
        long, size = torch.long, PREFILL_CHUNK_TOKENS
        self.seats, self.tile_rows = seats, tile_rows
        self.rows = QueuedBuffer(
            device,
            tokens=(long, (size,)),
            positions=(long, (size,)),  # for rotary angles
            slots=(long, (size,)),
            reach=(long, (size,)),
            owners=(torch.int32, (size,)),
            tiles=(torch.int32, (max_tiles(size, seats + 1, tile_rows) + 1,)),
        )

    def fill(self, chunk: Chunk, first: int = 0) -> None:
        """Send the rows. `first` is 1 for a head, whose column of a token has the state of the token before it: then
        a row gets the next token, and the last row of a prompt, whose next token is the root, becomes padding."""
        here, size = self.rows.wait_writable(), chunk.size
        for name in ("tokens", "positions", "slots", "reach", "owners"):
            here[name][:size] = UNUSED_PAGE * PAGE_TOKENS if name == "slots" else 0
        for row, start, end, prompt in ((part.row, part.start, part.end, part.prompt) for part in chunk.parts):
            index = np.arange(start + first, min(end + first, len(prompt.tokens) - 1))  # of the keys in the text
            rows = slice(row, row + len(index))
            here["tokens"][rows] = prompt.tokens[start + first : start + first + len(index)]
            here["positions"][rows] = index - first
            here["slots"][rows] = slots_of(prompt.pages, index)
            here["reach"][rows] = index + 1
            here["owners"][row : row + end - start] = prompt.seat
        self._fill_tiles(chunk, here)
        self.rows.send()

    def _fill_tiles(self, chunk: Chunk, here: dict[str, Any]) -> None:
        starts = [row for part in chunk.parts for row in range(part.rows.start, part.rows.stop, self.tile_rows)]
        starts += range(chunk.rows, chunk.size, self.tile_rows)
        here["tiles"][:] = chunk.size
        here["tiles"][: len(starts)] = starts

    def given(self, chunk_size: int, alone: bool, lengths: torch.Tensor, tables: torch.Tensor, first: int = 0) -> Pass:
        """The rows on the device."""
        there = {name: array[:chunk_size] for name, array in self.rows.device.items() if name != "tiles"}
        tiles = None
        if not alone:
            tiles = self.rows.device["tiles"][: max_tiles(chunk_size, self.seats + 1, self.tile_rows) + 1]
        pages = Pages(there["owners"], lengths, tables, tiles)
        paths = Paths(there["reach"], None, pages, first)
        return Pass.in_pages(there["tokens"], there["positions"], there["slots"], paths)

    def pass_after(self, rows: BatchRows, count: int, lengths: torch.Tensor, tables: torch.Tensor, trees: bool) -> Pass:
        """One pass: the rows of trees, or roots, and then the first `count` rows of the chunk."""
        both = {
            name: torch.cat([getattr(rows, name), self.rows.device[name][:count]])
            for name in ("tokens", "positions", "slots", "reach", "owners")
        }
        tiles = self.rows.device["tiles"][: max_tiles(count, self.seats + 1, self.tile_rows) + 1]
        pages = Pages(both["owners"], lengths, tables, torch.cat([rows.tiles[:-1], tiles + len(rows.tokens)]))
        lineage = torch.cat([rows.lineage, rows.lineage.new_zeros(count, rows.lineage.shape[1])]) if trees else None
        paths = Paths(both["reach"], lineage, pages)
        return Pass.in_pages(both["tokens"], both["positions"], both["slots"], paths)


def slots_of(pages: list[int], positions: Integers) -> Integers:
    """The slots of these positions of the text with these pages."""
    return np.asarray(pages)[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
