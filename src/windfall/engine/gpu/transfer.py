"""Named arrays that travel between host and device in one copy: tensors there, numpy here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from windfall.kernels.publish import copy_to_host

ALIGNED = 16  # bytes
Array = tuple[torch.dtype, tuple[int, ...]]  # what an array is made of


class PackedBuffer:
    """The same arrays on both sides, in one block of bytes each; `send` and `tell` copy all of them at once."""

    def __init__(self, device: torch.device, **arrays: Array):
        places, size = {}, 0
        for name, (dtype, shape) in arrays.items():
            places[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        self._lay(torch.zeros(size, dtype=torch.uint8, device=device), arrays, places)

    def _lay(self, there: Tensor, arrays: Mapping[str, Array], places: Mapping[str, int]) -> None:
        pinned = there.device.type == "cuda"
        self._there = there
        self._here = torch.zeros(len(there), dtype=torch.uint8, pin_memory=True) if pinned else there
        self._arrays, self._places = arrays, places
        self._sent: Any = None  # the end of the last copy to the device
        self.device = {name: _view(self._there, places[name], *array) for name, array in arrays.items()}
        self.host = self.read(self._here)

    def part(self, *names: str) -> PackedBuffer:
        """These arrays, and any that lie between them, as a parcel of their own: a smaller copy of the same memory."""
        order = list(self._arrays)
        first, last = (pick(map(order.index, names)) for pick in (min, max))
        start = self._places[order[first]]
        end = self._places[order[last + 1]] if last + 1 < len(order) else len(self._there)
        within = {name: self._arrays[name] for name in order[first : last + 1]}
        made = PackedBuffer.__new__(PackedBuffer)
        made._lay(self._there[start:end], within, {name: self._places[name] - start for name in within})
        return made

    def settled(self) -> dict[str, NDArray[Any]]:
        """The host's arrays, once the last `send` has read them."""
        if self._sent is not None:
            self._sent.synchronize()
        return self.host

    def send(self) -> None:
        """Copy host to device, in the order of the stream; see `settled` before changing the host's side."""
        if self._here is not self._there:
            self._there.copy_(self._here, non_blocking=True)
        if self._there.is_cuda:
            self._sent = self._sent or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()

    def tell(self) -> None:
        """Device to host, likewise."""
        if self._here is not self._there:
            copy_to_host(self._there, self._here)

    @property
    def bytes(self) -> Tensor:
        """The device's side."""
        return self._there

    def read(self, block: Tensor) -> dict[str, NDArray[Any]]:
        """The arrays in such a block of bytes, which may be longer."""
        return {name: _view(block, self._places[name], *array).numpy() for name, array in self._arrays.items()}


def _view(block: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return block[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
