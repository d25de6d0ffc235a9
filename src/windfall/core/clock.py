"""Clocks: time on a device, and the seconds of each part of a cycle."""

from __future__ import annotations

import time

import torch

from windfall.core.types import Split


def now(device: torch.device) -> float:
    """The time in seconds, after all work queued on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


class Stopwatch:
    """Measures the seconds that each part of a cycle takes."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._parts = dict.fromkeys(Split._fields, 0.0)

    def lap(self, part: str) -> float:
        """Add the time since the last lap to this part."""
        before, self._last = self._last, time.perf_counter()
        taken = self._last - before
        self._parts[part] += taken
        return taken

    @property
    def split(self) -> Split:
        return Split(**self._parts)
