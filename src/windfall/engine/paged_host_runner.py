"""Decodes several requests in the host loop, on the KV cache in pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from windfall.costs.online import OnlineCosts
from windfall.drafters.base import Drafter
from windfall.engine.batch_runner import Outcome, Use
from windfall.engine.host_runner import TREE_ROWS, HostRunner
from windfall.engine.sequence import Sequence
from windfall.kernels.pages import PAGE_TOKENS, pages_for

if TYPE_CHECKING:
    from windfall.engine.gpu.batch.paged_target import PagedTarget
    from windfall.engine.gpu.batch.runner import GpuBatchRunner


DRAFTER_SHARE = 0.25  # of the memory for pages that a drafter with a cache of its own may use in addition


class PagedHostRunner(HostRunner):
    """A `HostRunner` for requests on a GPU whose policy, drafter or sampling needs the host in every cycle.

    They share verify passes, which are CUDA graphs, and the draft passes of their drafter.
    """

    def __init__(self, target: PagedTarget, drafter: Drafter, online_costs: OnlineCosts):
        super().__init__(target, drafter, target.gpu_target.device, online_costs, costs_are_of_gpu=online_costs.learns)
        self._paged = target
        target.tree_rows = TREE_ROWS  # until a tree is larger

    def _round(self) -> dict[Sequence, Outcome]:
        """One cycle. If trees are larger than any before and there are no pages for them, nothing happens: `fits` then
        counts trees of this size, so that the scheduler makes room."""
        self._paged.params = [sequence.params for sequence in self.live.values()]
        known = self._paged.tree_rows
        try:
            return super()._round()
        except MemoryError:
            if self.loop.walked or self._paged.tree_rows == known:
                raise
            self._start(list(self.live.values()))
            return {}

    def pages_needed(self, lengths: Mapping[Sequence, int]) -> int:
        """Pages for sequences of these lengths and their trees; those that sequences share are counted for each."""
        return sum(pages_for(length + self._paged.tree_rows) for length in lengths.values())

    def fits(self, lengths: Mapping[Sequence, int]) -> bool:
        """Whether there are pages for these sequences and their trees, if no other runner uses any.

        A drafter that does not draft in these pages has a padded cache of its own.
        """
        cache, count = self._paged.cache, len(lengths)
        padded = count * (max(lengths.values(), default=0) + self._paged.tree_rows) * self.drafter.row_bytes
        room = count <= self._paged.seats and padded <= DRAFTER_SHARE * cache.kv.nbytes
        return room and self.pages_needed(lengths) <= cache.pool.pages

    @property
    def has_room(self) -> bool:
        return False  # `fits` takes microseconds, and a cycle of the host milliseconds

    @property
    def max_length(self) -> int:
        """The number of tokens up to which a single sequence fits."""
        return min(self._paged.longest, self._paged.cache.pool.pages * PAGE_TOKENS)

    @property
    def use(self) -> Use:
        """The share of the pages that are in use, and the budget of the last round."""
        pool = self._paged.cache.pool
        return Use(1 - pool.available / pool.pages, self.loop.budget)


def share_pages(
    rounds: GpuBatchRunner, on_host: PagedHostRunner, mine: Mapping[Sequence, int], others: Mapping[Sequence, int]
) -> bool:
    """Whether there are pages for the sequences of both runners, which use one KV cache."""
    return rounds.pages_needed(mine) + on_host.pages_needed(others) <= rounds.pool.pages
