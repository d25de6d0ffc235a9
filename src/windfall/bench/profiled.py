"""What torch's profiler sees: kernels, their launches and their time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from windfall.engine import Generation

SHOWN = 30  # kernels that are listed
PRODUCTS = ("gemm", "gemv", "cutlass", "nvjet", "cublas", "splitk", "flash", "fmha", "attention", "triton_")
FUSED = ("_attend", "_combine", "_add_norm", "_silu_mul", "_rotate_and_store", "_pair_norm")
MODEL = PRODUCTS + FUSED  # in the names of kernels that compute a model


@dataclass(frozen=True)
class Kernel:
    """Launches of one kernel, or copies of one kind."""

    name: str
    count: int
    seconds: float

    @property
    def copies(self) -> bool:
        return self.name.startswith(("Memcpy", "Memset"))

    @property
    def model(self) -> bool:
        """Whether it computes a model, and does not choose, draw or move something."""
        return any(part in self.name.lower() for part in MODEL)


def kernels(work: Callable[[], object]) -> list[Kernel]:
    """What this work launches on a GPU, most seconds first."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for event in seen.events() or []:
        if event.device_type.name == "CUDA":
            counts[event.name] += 1
            seconds[event.name] += event.time_range.elapsed_us() / 1e6
    made = [Kernel(name, count, seconds[name]) for name, count in counts.items()]
    return sorted(made, key=lambda each: -each.seconds)


def inside(generate: Callable[[], Generation], cycle_seconds: float) -> dict[str, Any]:
    """What the kernels of a generation do, as shares of the time that its cycles take unobserved."""
    made: list[Generation] = []
    seen = kernels(lambda: made.append(generate()))
    cycles = made[0].stats.cycles
    wall = max(cycles * cycle_seconds, 1e-9)
    host = [each for each in seen if each.name.startswith("Memcpy DtoH")]
    return {
        "launches_per_cycle": sum(each.count for each in seen if not each.copies) / cycles,
        "copies_to_host_per_cycle": sum(each.count for each in host) / cycles,
        "busy_share": sum(each.seconds for each in seen) / wall,
        "model_share": sum(each.seconds for each in seen if each.model) / wall,
        "rest_share": 1 - sum(each.seconds for each in seen if each.model) / wall,
        "kernels": [
            {
                "name": each.name[:120],
                "per_cycle": each.count / cycles,
                "share": each.seconds / wall,
                "model": each.model,
            }
            for each in seen[:SHOWN]
        ],
    }
