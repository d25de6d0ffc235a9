"""Device memory that methods need: while others are loaded too, or each by itself."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from windfall.engine import Engine
from windfall.records import SamplingParams
from windfall.target import Target


class PeakMemory:
    """The most memory that a CUDA device held since this was made."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def peak(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self.device)) if self.device.type == "cuda" else None


def peak_apart(target: Target, make: Callable[[], Engine], ids: list[int], params: SamplingParams) -> int:
    """The most bytes of a CUDA device that a new engine needs for one answer, weights included.

    Weights of the target that were merged for an earlier engine count as if they were still apart.
    """
    _clear()
    before = torch.cuda.memory_allocated(target.device)
    memory = PeakMemory(target.device)
    engine = make()
    engine.decode([ids], [params])
    peak = memory.peak
    assert peak is not None
    del engine
    _clear()
    return int(peak - before + sum(weight.nbytes for weight in target.model.parameters()))


def _clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()
