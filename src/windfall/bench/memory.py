"""Peak device memory of methods."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import torch

from windfall.core.types import SamplingParams
from windfall.engine.engine import Engine
from windfall.model.target import Target

WARM_UP_TOKENS = 8
DEFAULT_POOL = (0, 0)  # the allocator's pool for memory that belongs to no CUDA graph


class PeakMemory:
    """The peak memory of a CUDA device since this object was made."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def peak(self) -> int | None:
        return int(torch.cuda.max_memory_allocated(self.device)) if self.device.type == "cuda" else None


def peak_apart(target: Target, make: Callable[[], Engine], ids: list[int], params: SamplingParams) -> int:
    """The peak bytes of a CUDA device that a new engine needs for one answer, including the weights.

    A first engine allocates what all engines of a process share (merged weights, workspaces of libraries) before
    anything is counted. The answer is generated twice: the first time captures CUDA graphs, which afterwards hold
    memory that the allocator reports as free.
    """
    device, short = target.device, replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens))
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
    """Bytes of this device that CUDA graphs hold for their replays, and that the allocator reports as free."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != DEFAULT_POOL
    )


def clear(device: torch.device) -> None:
    """Free unused memory, after waiting for work that the last engine left on the device."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
