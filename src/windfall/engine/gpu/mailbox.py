"""What the device tells the host again and again while it works on: each time into the next of a few blocks."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from numpy.typing import NDArray

from windfall.engine.gpu.transfer import PackedBuffer
from windfall.kernels.backend import on_triton
from windfall.kernels.publish import SEQUENCE_BYTES, publish

PATIENCE = 4096  # looks before others get a chance to run


class Mailbox:
    """Blocks of a parcel's arrays on the host. The device numbers what it tells, and the host what it asked for: so the
    host can look for a number, instead of waiting for all work up to some mark."""

    def __init__(self, parcel: PackedBuffer, blocks: int):
        self._there, device = parcel.bytes, parcel.bytes.device
        self._turn = torch.zeros(1, dtype=torch.long, device=device)  # of what was told last
        self._done = torch.zeros(1, dtype=torch.int32, device=device)
        size, pinned = len(self._there), device.type == "cuda"
        self._blocks = torch.zeros(blocks, size + SEQUENCE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._numbers = [memoryview(block[size : size + 8].view(torch.long).numpy()) for block in self._blocks]
        self.arrays: list[dict[str, NDArray[Any]]] = [parcel.read(block) for block in self._blocks]
        self._asked = 0  # never behind what was launched
        self._ordered = on_triton(self._there) or not pinned  # else a number may come before what it numbers
        if pinned:  # the device may still write there when nobody knows of it any more
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False

    def tell(self) -> None:
        """The parcel as it is now, into the next block: part of what is recorded."""
        publish(self._there, self._blocks, self._turn, self._done)

    def start(self) -> None:
        """What was told before counts no longer, nor what was asked for and never launched."""
        self._asked += 1
        self._turn.fill_(self._asked)

    def ask(self) -> int:
        """The number of what the work launched next will tell."""
        self._asked += 1
        return self._asked

    def wait(self, number: int) -> int:
        """Its block, once it is there; it stays until as many others as there are blocks were told."""
        if not self._ordered:
            torch.cuda.current_stream(self._there.device).synchronize()
        place, looks = number % len(self._blocks), 0
        seen = self._numbers[place]
        while seen[0] != number:
            looks += 1
            if looks % PATIENCE == 0:
                self._give_way(seen, number)
        return place

    def _give_way(self, seen: memoryview, number: int) -> None:
        """Let others run. Where the device has nothing left to do, or failed, waiting on would be for ever."""
        idle = self._there.device.type != "cuda" or torch.cuda.current_stream(self._there.device).query()
        if idle and seen[0] != number:
            raise RuntimeError(f"the device has told {seen[0]} where the host waits for {number}")
        time.sleep(0)
