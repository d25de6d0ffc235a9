"""Marks in the work of a device: when it has reached them, and how much time lies between two."""

from __future__ import annotations

import time
from typing import Any

import torch


class DeviceEvent:
    """A CUDA event; on a CPU, a time of the host's clock."""

    def __init__(self, device: torch.device):
        self._time = 0.0
        self._cuda_event: Any = None
        if device.type == "cuda":
            self._cuda_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self, stream: Any) -> DeviceEvent:
        """Mark this point of the stream; an earlier mark is lost."""
        self._time = time.perf_counter()
        if self._cuda_event is not None:
            self._cuda_event.record(stream)
        return self

    def wait(self) -> None:
        if self._cuda_event is not None:
            self._cuda_event.synchronize()

    def done(self) -> bool:
        return self._cuda_event is None or bool(self._cuda_event.query())

    def seconds_until(self, other: DeviceEvent) -> float:
        if self._cuda_event is None or other._cuda_event is None:
            return other._time - self._time
        return 0.0 if self is other else float(self._cuda_event.elapsed_time(other._cuda_event)) / 1000


class Events:
    """Marks points of a device's stream.

    Recording an event takes less time than making one or asking for the stream, so events and stream are kept.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._spare: list[DeviceEvent] = []
        self.use_current_stream()

    def use_current_stream(self) -> None:
        """Mark the stream that is current now."""
        self._stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def mark(self) -> DeviceEvent:
        """The present point of the stream."""
        event = self._spare.pop() if self._spare else DeviceEvent(self._device)
        return event.record(self._stream)

    def give_back(self, *events: DeviceEvent) -> None:
        """These events are not needed any more."""
        self._spare += events
