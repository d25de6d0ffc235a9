"""What the device tells the host again and again while it works on: each time into the next of a few blocks."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from numpy.typing import NDArray

from windfall.engine.gpu.transfer import PackedBuffer
from windfall.kernels.backend import on_triton
from windfall.kernels.publish import NUMBER, announce

POLLS_PER_YIELD = 4096  # polls before others get a chance to run


class Mailbox:
    """Blocks of a buffer's arrays on the host. The device numbers what it tells, and the host what it asked for: so the
    host can look for a number, instead of waiting for all work up to some mark."""

    def __init__(self, buffer: PackedBuffer, blocks: int):
        self._source, device = buffer.bytes, buffer.bytes.device
        self._last_number = torch.zeros(1, dtype=torch.long, device=device)  # of what was told last
        self._finished_blocks = torch.zeros(1, dtype=torch.int32, device=device)
        size, pinned = len(self._source), device.type == "cuda"
        self._blocks = torch.zeros(blocks, size + NUMBER, dtype=torch.uint8, pin_memory=pinned)
        self._numbers = [memoryview(block[size : size + 8].view(torch.long).numpy()) for block in self._blocks]
        self.arrays: list[dict[str, NDArray[Any]]] = [buffer.views(block) for block in self._blocks]
        self._expected = 0  # never behind what was launched
        self._ordered = on_triton(self._source) or not pinned  # else a number may come before what it numbers
        if pinned:  # the device may still write there when nobody knows of it any more
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False

    def publish(self) -> None:
        """The buffer as it is now, into the next block: part of what is recorded."""
        announce(self._source, self._blocks, self._last_number, self._finished_blocks)

    def reset(self) -> None:
        """What was told before counts no longer, nor what was asked for and never launched."""
        self._expected += 1
        self._last_number.fill_(self._expected)

    def expect(self) -> int:
        """The number of what the work launched next will tell."""
        self._expected += 1
        return self._expected

    def wait(self, number: int) -> int:
        """Its block, once it is there; it stays until as many others as there are blocks were told."""
        if not self._ordered:
            torch.cuda.current_stream(self._source.device).synchronize()
        place, polls = number % len(self._blocks), 0
        published = self._numbers[place]
        while published[0] != number:
            polls += 1
            if polls % POLLS_PER_YIELD == 0:
                self._yield_or_fail(published, number)
        return place

    def _yield_or_fail(self, published: memoryview, number: int) -> None:
        """Let others run. Where the device has nothing left to do, or failed, waiting on would be for ever."""
        idle = self._source.device.type != "cuda" or torch.cuda.current_stream(self._source.device).query()
        if idle and published[0] != number:
            raise RuntimeError(f"the device has told {published[0]} where the host waits for {number}")
        time.sleep(0)
