"""Kernels, launches and kernel time as torch's profiler reports them.

Once the profiler has run, launches are slower for the rest of the process (those of CUDA graphs two to ten times). So
everything that is timed must be timed before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from windfall.engine.engine import Generation

MAX_LISTED_KERNELS = 30
TIMED_ANSWERS = 5
PRODUCTS = ("gemm", "gemv", "cutlass", "nvjet", "cublas", "splitk", "flash", "fmha", "attention", "triton_")
FUSED = (
    *("_embed", "_attend", "_combine", "_norm", "_linear", "_matmul", "_gate_mul", "_soft_cap", "_rotate_and_store"),
    *("_choose_experts", "_expert_gate_up", "_expert_down", "_sum_experts"),
)
CHILDREN = ("_multiply_vocabulary", "_block_maxima", "_pick_children")  # a drafter's best tokens: the end of its pass
MODEL = PRODUCTS + FUSED + CHILDREN  # in the names of kernels of a target's or a drafter's pass


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
        """Whether it belongs to a model's pass, rather than to choosing, drawing or moving rows."""
        return any(part in self.name.lower() for part in MODEL)


def kernels(work: Callable[[], object], device: torch.device) -> list[Kernel]:
    """The kernels that this work launches on a GPU, most seconds first.

    Where kernels overlap, because one is launched before the previous one has ended, the time counts for the previous.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize(device)
    counts: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    ranges = [(each.time_range, each.name) for each in seen.events() or [] if each.device_type.name == "CUDA"]
    ended = 0.0
    for span, name in sorted(ranges, key=lambda each: (each[0].start, each[0].end)):
        counts[name] += 1
        seconds[name] += max(span.end - max(span.start, ended), 0.0) / 1e6
        ended = max(ended, span.end)
    made = [Kernel(name, count, seconds[name]) for name, count in counts.items()]
    return sorted(made, key=lambda each: -each.seconds)


def unobserved(answer: Callable[[], Generation]) -> float:
    """Seconds of an answer after its first cycle, without the profiler."""
    return median(made.stats.seconds - made.stats.ttft for made in (answer() for _ in range(TIMED_ANSWERS)))


def inside(
    answer: Callable[[], Generation], beginning: Callable[[], Generation], seconds: float, device: torch.device
) -> dict[str, Any]:
    """What kernels do in the cycles of an answer after the first, as shares of the time of these cycles.

    That time is `seconds`, measured without the profiler, or the kernels' own time if it is longer under the profiler.
    """
    cycles = max(answer().stats.cycles - beginning().stats.cycles, 1)
    seen = after(kernels(beginning, device), kernels(answer, device))
    wall = max(seconds, sum(each.seconds for each in seen), 1e-9)
    host = [each for each in seen if each.name.startswith("Memcpy DtoH")]
    return {
        "cycle_seconds": wall / cycles,
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
            for each in seen[:MAX_LISTED_KERNELS]
        ],
    }


def after(first: list[Kernel], whole: list[Kernel]) -> list[Kernel]:
    """The kernels of a whole answer without those of its first cycle, most seconds first."""
    known = {each.name: each for each in first}
    rest = []
    for each in whole:
        less = known.get(each.name, Kernel(each.name, 0, 0.0))
        rest.append(Kernel(each.name, max(each.count - less.count, 0), max(each.seconds - less.seconds, 0.0)))
    return sorted(rest, key=lambda each: -each.seconds)
