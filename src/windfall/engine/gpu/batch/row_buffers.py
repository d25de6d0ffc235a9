"""The rows of a pass that the host chooses: those of several sequences, one sequence after the other."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from windfall.core.tree import Integers
from windfall.engine.gpu.batch.round import MAX_ROUND_ROWS, round_rows
from windfall.engine.gpu.batch.state import ALL_COMMITTED
from windfall.engine.gpu.forward import Pass, Paths
from windfall.engine.gpu.transfer import QueuedBuffer
from windfall.kernels.pages import PAGE_TOKENS, UNUSED_PAGE, Pages, max_tiles

NO_TREE = 0  # levels in a pass whose rows are chains


class HostRows(NamedTuple):
    """What the host knows of the rows of a pass."""

    owners: Integers  # [n] their sequences
    numbers: Integers  # [n] from 0 in each sequence
    tokens: Integers  # [n]
    columns: Integers  # [n] the position of each row's key in its text
    slots: Integers  # [n] where its key lies


class Shape(NamedTuple):
    """What a captured pass depends on."""

    size: int  # rows, with padding
    levels: int  # of the trees: longer lineages take longer to send


class RowBuffers:
    """Fixed buffers for the rows of a pass, at most MAX_ROUND_ROWS."""

    def __init__(self, device: torch.device, seats: int, tile_rows: int, levels: tuple[int, ...], first: int = 0):
        """`levels`: sizes of the buffers for lineages. For `first` see `BatchDrafter`."""
        long, rows = torch.long, MAX_ROUND_ROWS
        self.seats, self.tile_rows, self.first, self._sizes = seats, tile_rows, first, levels
        self._rows = QueuedBuffer(
            device,
            tokens=(long, (rows,)),
            positions=(long, (rows,)),  # for rotary angles
            slots=(long, (rows,)),
            reach=(long, (rows,)),
            owners=(torch.int32, (rows,)),
            lengths=(long, (seats,)),  # of the texts before the trees
            tiles=(torch.int32, (max_tiles(rows, seats + 1, tile_rows) + 1,)),
        )
        self._lineages = {size: QueuedBuffer(device, slots=(torch.int32, (rows, size))) for size in levels}

    @property
    def device(self) -> dict[str, Tensor]:
        return self._rows.device

    def send_padding(self, size: int, levels: int) -> Shape:
        """Send this number of rows without a text, to capture a pass over them."""
        nothing = np.zeros(0, np.int64)
        self.send(HostRows(*[nothing] * len(HostRows._fields)), size=size)
        return Shape(size, levels)

    def send(
        self,
        rows: HostRows,
        lineages: Integers | None = None,
        lengths: Integers | None = None,
        size: int | None = None,
    ) -> Shape:
        """Send rows. Those of trees have `lineages` [n, levels], the slots of their ancestors and their own, and
        `lengths` [seats]: the number of columns before the trees. `size`: with padding; None: the next captured one."""
        here, count = self._rows.wait_writable(), len(rows.tokens)
        size = round_rows(count) if size is None else size
        given = {"positions": rows.columns - self.first, "reach": rows.columns + 1}
        given |= {"tokens": rows.tokens, "slots": rows.slots, "owners": rows.owners}
        for name, values in given.items():
            here[name][:count] = values
            here[name][count:size] = UNUSED_PAGE * PAGE_TOKENS if name == "slots" else 0
        padding = np.arange(count, size, self.tile_rows)
        tiles = np.concatenate([np.flatnonzero(rows.numbers % self.tile_rows == 0), padding])
        here["tiles"][:] = size
        here["tiles"][: len(tiles)] = tiles
        here["lengths"][:] = ALL_COMMITTED
        levels = NO_TREE
        if lineages is not None and lengths is not None:
            here["lengths"][: len(lengths)] = lengths
            levels = self._sizes[bisect_left(self._sizes, lineages.shape[1])]
            self._lineages[levels].wait_writable()["slots"][:count, : lineages.shape[1]] = lineages
            self._lineages[levels].send()
        self._rows.send()
        return Shape(size, levels)

    def given(self, shape: Shape, tables: Tensor) -> Pass:
        """The rows on the device, for texts with these pages."""
        size, levels = shape
        there = {name: array[:size] for name, array in self.device.items() if name not in ("tiles", "lengths")}
        tiles = self.device["tiles"][: max_tiles(size, self.seats + 1, self.tile_rows) + 1]
        pages = Pages(there["owners"], self.device["lengths"], tables, tiles)
        lineage = self._lineages[levels].device["slots"][:size] if levels else None
        return Pass.in_pages(
            there["tokens"], there["positions"], there["slots"], Paths(there["reach"], lineage, pages, self.first)
        )


def layout(counts: list[int]) -> tuple[Integers, Integers, Integers]:
    """Rows of several groups, one group after the other: the group of each row, its number among all rows, and the
    number of the first row of its group."""
    ends: Integers = np.cumsum(np.array(counts, np.int64))
    group: Integers = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return group, np.arange(len(group), dtype=np.int64), (ends - counts)[group]
