"""The target's KV cache in pages, which the runners of several requests share."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

import torch

from windfall.engine.gpu.batch.page_pool import PagePool
from windfall.engine.gpu.target import GpuTarget, in_pages
from windfall.kernels.pages import PAGE_TOKENS


class Lender(Protocol):
    """Takes pages in advance."""

    def return_granted(self) -> None:
        """Give back the pages that are not needed yet."""


class PagedCache:
    """Keys and values in pages, and rows after the pages for passes whose rows may be rejected."""

    def __init__(self, gpu_target: GpuTarget, pages: int, staged: int = 0):
        """`pages` of the KV cache, the unused one included, and `staged` rows after them. Raises Unsupported if the
        target cannot run on pages."""
        self.gpu_target, self.forward = gpu_target, in_pages(gpu_target.forward)
        layers, heads, width = self.forward.shape
        self.pool, self.staging = PagePool(pages), pages * PAGE_TOKENS
        size = (2, layers, heads, self.staging + staged, width)
        self.kv = torch.zeros(size, dtype=gpu_target.dtype, device=gpu_target.device)
        self.lenders: WeakSet[Lender] = WeakSet()
        self._watched = [weight for weight in gpu_target.weights if not weight.is_inference()]  # that have versions
        self._versions = self._weight_versions()

    def forget_outdated(self) -> None:
        """Forget all known pages if weights were changed in place since the last call."""
        if (versions := self._weight_versions()) != self._versions:
            self.pool.clear()
            self._versions = versions

    def _weight_versions(self) -> int:
        """Grows when weights are changed in place."""
        return sum([weight._version for weight in self._watched])

    def make_room(self, count: int) -> None:
        """Make this number of pages available, if enough were taken in advance."""
        if count > self.pool.available:
            for lender in self.lenders:
                lender.return_granted()

    def take(self, count: int) -> list[int]:
        """New pages; raises a MemoryError if there are fewer."""
        self.make_room(count)
        if count > self.pool.available:
            raise MemoryError(f"the KV cache has {self.pool.available} free pages, and {count} are needed")
        return self.pool.take(count)
