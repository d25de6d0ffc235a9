"""Device memory that methods need: while others are loaded too, or each by itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from windfall.core.types import SamplingParams
from windfall.engine.engine import Engine
from windfall.model.target import Target

SHORT = 8  # tokens of an answer to warm up
COMMON = (0, 0)  # the allocator's pool for everything that no graph holds


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

    What the first engine of a process leaves to all later ones (merged weights, workspaces of libraries) is there
    before anything is counted. The answer is given twice, as graphs are recorded in the first: afterwards they hold
    memory that counts as free, and which nobody else can have.
    """
    device, short = target.device, replace(params, max_new_tokens=min(SHORT, params.max_new_tokens))
    make().decode([ids], [short])
    clear(device)
    before, held = torch.cuda.memory_allocated(device), held_by_graphs(device)
    torch.cuda.reset_peak_memory_stats(device)
    engine = make()
    engine.decode([ids], [params])
    recording = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    engine.decode([ids], [params])
    replaying = torch.cuda.max_memory_allocated(device) + held_by_graphs(device) - held
    del engine
    clear(device)
    return int(max(recording, replaying) - before + sum(weight.nbytes for weight in target.model.parameters()))


def held_by_graphs(device: torch.device) -> int:
    """Bytes of this device that recorded graphs keep for their replays, and that count as free meanwhile."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != COMMON
    )


def clear(device: torch.device) -> None:
    """Give back what nobody uses; the last engine may have a cycle under way that nobody waited for."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
