"""Named arrays that are copied between host and device in one piece: numpy on the host, tensors on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from windfall.kernels.publish import copy_to_host

ALIGNMENT_BYTES = 16  # of each array in the block
QUEUED_COPIES = 4  # of a `QueuedBuffer`: as many may be sent before the device has read the first
ArraySpec = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape


class PackedBuffer:
    """The same arrays on host and device, in one block of bytes each; `send` and `publish` copy the whole block."""

    def __init__(self, device: torch.device, **arrays: ArraySpec):
        places, size = {}, 0
        for name, (dtype, shape) in arrays.items():
            places[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._allocate(torch.zeros(size, dtype=torch.uint8, device=device), arrays, places)

    def _allocate(self, there: Tensor, arrays: Mapping[str, ArraySpec], places: Mapping[str, int]) -> None:
        pinned = there.device.type == "cuda"
        self._device_bytes = there
        self._host_bytes = torch.zeros(len(there), dtype=torch.uint8, pin_memory=True) if pinned else there
        self._arrays, self._places = arrays, places
        self._last_send: Any = None  # CUDA event after the last copy to the device
        self.device = {name: _view(self._device_bytes, places[name], *array) for name, array in arrays.items()}
        self.host = self.views(self._host_bytes)

    def subset(self, *names: str) -> PackedBuffer:
        """A buffer of these arrays and any between them: it shares the device memory, and copies less."""
        order = list(self._arrays)
        first, last = (pick(map(order.index, names)) for pick in (min, max))
        start = self._places[order[first]]
        end = self._places[order[last + 1]] if last + 1 < len(order) else len(self._device_bytes)
        within = {name: self._arrays[name] for name in order[first : last + 1]}
        made = PackedBuffer.__new__(PackedBuffer)
        made._allocate(self._device_bytes[start:end], within, {name: self._places[name] - start for name in within})
        return made

    def wait_writable(self) -> dict[str, NDArray[Any]]:
        """Wait until the last `send` has read the host's arrays; returns them."""
        if self._last_send is not None:
            self._last_send.synchronize()
        return self.host

    def send(self) -> None:
        """Copy host to device in stream order; call `wait_writable` before the host changes its arrays again."""
        if self._host_bytes is not self._device_bytes:
            self._device_bytes.copy_(self._host_bytes, non_blocking=True)
        if self._device_bytes.is_cuda:
            self._last_send = self._last_send or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._last_send.record()

    def publish(self) -> None:
        """Copy device to host in stream order."""
        if self._host_bytes is not self._device_bytes:
            copy_to_host(self._device_bytes, self._host_bytes)

    @property
    def bytes(self) -> Tensor:
        """The block on the device."""
        return self._device_bytes

    def views(self, block: Tensor) -> dict[str, NDArray[Any]]:
        """The arrays in another host block of this layout, which may be longer."""
        return {name: _view(block, self._places[name], *array).numpy() for name, array in self._arrays.items()}


class QueuedBuffer(PackedBuffer):
    """A PackedBuffer whose host arrays may be changed at once after `send`, while the device is still busy with earlier
    work: the device reads copies of them, in turn."""

    def __init__(self, device: torch.device, **arrays: ArraySpec):
        super().__init__(device, **arrays)
        self._copies: list[tuple[Tensor, Any]] = []  # pinned bytes, and the event after the device has read them
        if device.type == "cuda":
            for _ in range(QUEUED_COPIES):
                pinned = torch.zeros(len(self._host_bytes), dtype=torch.uint8, pin_memory=True)
                self._copies.append((pinned, torch.cuda.Event()))  # type: ignore[no-untyped-call]

    def wait_writable(self) -> dict[str, NDArray[Any]]:
        return self.host

    def send(self) -> None:
        if not self._copies:
            return
        pinned, read = self._copies.pop(0)
        read.synchronize()  # of a copy that was sent several rounds ago
        pinned.copy_(self._host_bytes)
        self._device_bytes.copy_(pinned, non_blocking=True)
        read.record()
        self._copies.append((pinned, read))


def place(values: Any, device: torch.device) -> Tensor:
    """A tensor of these numbers on the device; the host does not wait until the device has finished earlier work."""
    return torch.tensor(values, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _view(block: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return block[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
