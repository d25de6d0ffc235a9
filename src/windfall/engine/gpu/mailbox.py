"""Results that the device publishes to the host while it keeps running, in a ring of pinned host buffers."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from numpy.typing import NDArray

from windfall.engine.gpu.transfer import PackedBuffer
from windfall.kernels.backend import on_triton
from windfall.kernels.publish import SEQUENCE_BYTES, publish

POLLS_PER_YIELD = 4096  # polls before other threads get a chance to run
POLLS_PER_PATIENT_YIELD = 16  # the same where a microsecond more does not matter


class Mailbox:
    """A ring of host copies (blocks) of a buffer's arrays.

    Each published block carries a sequence number. The host knows the number of each publication in advance and polls
    for it, so that it need not wait for a stream or an event.
    """

    def __init__(self, buffer: PackedBuffer, blocks: int):
        self._source, device = buffer.bytes, buffer.bytes.device
        self._last_number = torch.zeros(1, dtype=torch.long, device=device)  # of the last published block
        self._finished_blocks = torch.zeros(1, dtype=torch.int32, device=device)  # the kernel's counter
        size, pinned = len(self._source), device.type == "cuda"
        self._blocks = torch.zeros(blocks, size + SEQUENCE_BYTES, dtype=torch.uint8, pin_memory=pinned)
        self._numbers = [memoryview(block[size : size + 8].view(torch.long).numpy()) for block in self._blocks]
        self.arrays: list[dict[str, NDArray[Any]]] = [buffer.views(block) for block in self._blocks]
        self._expected = 0  # at least the number of the last launched publication
        self._ordered = on_triton(self._source) or not pinned  # else the number may arrive before the data
        if pinned:  # the device may still write to the blocks when this object is freed
            weakref.finalize(self, torch.cuda.synchronize, device).atexit = False

    def publish(self) -> None:
        """Copy the buffer into the next block; a CUDA graph can capture this."""
        publish(self._source, self._blocks, self._last_number, self._finished_blocks)

    def reset(self) -> None:
        """Start anew: earlier publications do not count, nor those that were expected but never launched."""
        self._expected += 1
        self._last_number.fill_(self._expected)

    def expect(self) -> int:
        """The sequence number of the next publication; call this once for each, before its launch."""
        self._expected += 1
        return self._expected

    def has(self, number: int) -> bool:
        """Whether this publication has come; a later one must not have overwritten it."""
        return bool(self._numbers[number % len(self._blocks)][0] == number)

    def wait(self, number: int, patient: bool = False) -> int:
        """Wait for this publication; returns its block, which later publications overwrite once the ring is full.

        `patient`: other threads may run nearly all the time. Without it, those that want to run wait for a part of a
        millisecond whenever they have released the interpreter's lock.
        """
        if not self._ordered:
            torch.cuda.current_stream(self._source.device).synchronize()
        place, polls = number % len(self._blocks), 0
        published = self._numbers[place]
        while published[0] != number:
            polls += 1
            if polls % POLLS_PER_YIELD == 0:
                self._yield_or_fail(published, number)
            elif patient and polls % POLLS_PER_PATIENT_YIELD == 0:
                time.sleep(0)
        return place

    def _yield_or_fail(self, published: memoryview, number: int) -> None:
        """Let other threads run; raise an error if the device is idle or failed, as the number would never come."""
        idle = self._source.device.type != "cuda" or torch.cuda.current_stream(self._source.device).query()
        if idle and published[0] != number:
            raise RuntimeError(f"the device has published {published[0]} where the host waits for {number}")
        time.sleep(0)
