"""Named arrays that travel between host and device in one copy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALIGNED = 16  # bytes


class Parcel:
    """The same arrays on both sides, in one block of bytes each; `send` and `fetch` copy all of them at once."""

    def __init__(self, device: torch.device, **arrays: tuple[torch.dtype, tuple[int, ...]]):
        places, size = {}, 0
        for name, (dtype, shape) in arrays.items():
            places[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        pinned = device.type == "cuda"
        self._there = torch.zeros(size, dtype=torch.uint8, device=device)
        self._here = torch.zeros(size, dtype=torch.uint8, pin_memory=True) if pinned else self._there
        self.device = {name: _view(self._there, places[name], *array) for name, array in arrays.items()}
        self.host = {name: _view(self._here, places[name], *array) for name, array in arrays.items()}

    def send(self) -> None:
        """Host to device, in the order of the stream; the host's side must not change until then."""
        if self._here is not self._there:
            self._there.copy_(self._here, non_blocking=True)

    def fetch(self, into: Tensor | None = None) -> None:
        """Device to host, in the order of the stream; into another block of the same size where one is given."""
        goal = self._here if into is None else into
        if goal is not self._there:
            goal.copy_(self._there, non_blocking=True)

    def block(self) -> Tensor:
        """Another host-side block for `fetch`."""
        return torch.zeros_like(self._here, pin_memory=self._here is not self._there)

    def read(self, block: Tensor) -> dict[str, Tensor]:
        """The arrays in such a block."""
        base = self._here
        start = base.data_ptr()
        return {
            name: _view(block, array.data_ptr() - start, array.dtype, tuple(array.shape))
            for name, array in self.host.items()
        }


def _view(block: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return block[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
