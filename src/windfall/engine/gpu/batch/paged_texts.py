"""The sequences of the host loop on a KV cache in pages: their pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windfall.core.tree import Integers
from windfall.engine.gpu.batch.paged_cache import PagedCache
from windfall.engine.gpu.transfer import QueuedBuffer
from windfall.kernels.pages import PAGE_TOKENS, UNUSED_PAGE, pages_for

SPANS = (32, 128, 512, 2048, 8192)  # pages of a sequence that captured passes read


@dataclass(eq=False)
class Text:
    """A sequence that runs."""

    tokens: list[int]  # committed ones
    pages: list[int]


class PagedTexts:
    """The pages of sequences, in the order of their seats, and a table of them on the device."""

    def __init__(self, cache: PagedCache, seats: int, longest: int):
        """At most `seats` sequences of up to `longest` positions."""
        self.cache, self.seats, self.max_pages = cache, seats, pages_for(longest)
        self._texts: list[Text] = []
        self._tables = QueuedBuffer(cache.gpu_target.device, tables=(torch.int32, (seats, self.max_pages)))
        self._changed = True

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, seat: int) -> Text:
        return self._texts[seat]

    def __iter__(self) -> Iterator[Text]:
        return iter(self._texts)

    @property
    def lengths(self) -> Integers:
        """The number of committed tokens of each sequence."""
        return np.array([len(text.tokens) for text in self._texts])

    def add(self, tokens: list[int], pages: list[int]) -> Text:
        """A new sequence after the others."""
        self._texts.append(Text(tokens, pages))
        return self._texts[-1]

    def release(self, first: int) -> None:
        """Drop the sequences from seat `first` on."""
        for text in self._texts[first:]:
            self.cache.pool.release(text.pages)
        del self._texts[first:]

    def retain(self, keep: list[int]) -> None:
        """Keep these sequences only."""
        kept = [self._texts[place] for place in keep]
        for text in self._texts:
            if text not in kept:
                self.cache.pool.release(text.pages)
        self._texts = kept
        tables = self._tables.wait_writable()["tables"]
        tables[: len(keep)] = tables[keep]
        self._changed = True

    def has_pages(self, seat: int, positions: int) -> bool:
        """Whether a sequence has the pages for this number of positions."""
        return pages_for(positions) <= len(self._texts[seat].pages)

    def take_pages(self, seat: int, positions: int) -> None:
        """Give a sequence the pages for this number of positions; raises a MemoryError if there are none left."""
        text = self._texts[seat]
        text.pages += self.cache.take(max(pages_for(positions) - len(text.pages), 0))
        table = self._tables.wait_writable()["tables"][seat]
        table[: len(text.pages)] = text.pages
        table[len(text.pages) :] = UNUSED_PAGE
        self._changed = True

    def slots(self, owners: Integers, positions: Integers) -> Integers:
        """The slots of these positions of these sequences."""
        pages = self._tables.host["tables"][owners, positions // PAGE_TOKENS].astype(np.int64)
        found: Integers = pages * PAGE_TOKENS + positions % PAGE_TOKENS
        return found

    @property
    def span(self) -> int:
        """Pages of each sequence that the next pass reads."""
        most = max((len(text.pages) for text in self._texts), default=1)
        return min(next((span for span in SPANS if span >= most), most), self.max_pages)

    @property
    def tables(self) -> Tensor:
        """The first `span` pages of each sequence."""
        return self._tables.device["tables"][:, : self.span]

    def send(self) -> None:
        """Send the table, if it has changed."""
        if self._changed:
            self._tables.send()
            self._changed = False
