"""Measures the costs of passes on fixed buffers: replays CUDA graphs of each size and times them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from windfall.core.types import SamplingParams
from windfall.costs.curves import Costs, Curve, monotone
from windfall.engine.gpu.cycle import Cycle
from windfall.engine.gpu.drafters import ChildSampler
from windfall.engine.gpu.runner import GpuRunner
from windfall.policies import cheap_rows
from windfall.policies.auto import Auto
from windfall.policies.none import NoSpeculation

LENGTHS = (64, 512, 2048, 8192)  # committed tokens before a verify pass
ROUNDS = 9  # timed runs of each pass


@torch.inference_mode()
def costs(
    runner: GpuRunner, lengths: Sequence[int] = LENGTHS, progress: Callable[[float], None] = lambda share: None
) -> Costs:
    """The costs of verify passes of the sizes that plans use, after texts of these lengths, and of draft passes."""
    gpu_target, before, context = runner.gpu_target, runner.gpu_target.capacity, runner.target.context
    lengths = [length for length in lengths if context is None or length + 256 <= context] or [64]
    gpu_target.reserve(max(lengths) + 256)
    plan = NoSpeculation().plan() if runner.drafter_unsupported else Auto().plan()
    cycle = Cycle(plan, runner.drafter_form, gpu_target)
    try:
        taken = _measured(cycle, lengths, progress)
    finally:
        gpu_target.graph_cache.forget(cycle.buffers_id)
        if gpu_target.capacity != before:  # memory and, in half precision, rounding depend on it
            gpu_target.resize(before)
    return _folded(taken, lengths, plan.width)


def _measured(
    cycle: Cycle, lengths: Sequence[int], progress: Callable[[float], None]
) -> dict[tuple[object, ...], float]:
    """Median seconds of each kind of pass. Each round has its own order; the first one captures and does not count."""
    params = SamplingParams()
    sampler = ChildSampler(params, False, cycle.gpu_target.sampling)
    works: dict[tuple[object, ...], Callable[[], None]] = {}
    for length in lengths:
        for rows in cheap_rows.ROWS:
            works["verify", length, rows] = _verify(cycle, rows, params)
    if cycle.draft is not None:
        works["draft", 1] = lambda: cycle.draft_passes(1, sampler)
        works["draft", 4] = lambda: cycle.draft_passes(4, sampler)
    found: dict[tuple[object, ...], list[float]] = {key: [] for key in works}
    for turn in range(ROUNDS + 1):
        progress(turn / (ROUNDS + 1))
        for key in random.Random(turn).sample(list(works), len(works)):
            length = int(key[1]) if key[0] == "verify" else min(512, max(lengths))  # type: ignore[call-overload]
            seconds = _timed(cycle, key, works[key], length)
            if turn:
                found[key].append(seconds)
    return {key: median(taken) for key, taken in found.items()}


def _folded(taken: dict[tuple[object, ...], float], lengths: Sequence[int], width: int) -> Costs:
    grid = [monotone([taken["verify", length, rows] for rows in cheap_rows.ROWS]) for length in lengths]
    grid = [list(column) for column in zip(*map(monotone, zip(*grid, strict=True)), strict=True)]
    verifies = tuple(
        (n, Curve(cheap_rows.ROWS, tuple(own), stepped=True)) for n, own in zip(lengths, grid, strict=True)
    )
    opening = taken.get(("draft", 1), 0.0)
    later = max((taken.get(("draft", 4), 0.0) - opening) / 3, 0.0)
    return Costs(Curve((1, width), (later, later)), verifies, overhead=0.0, opening=max(opening - later, 0.0))


def _verify(cycle: Cycle, rows: int, params: SamplingParams) -> Callable[[], None]:
    return lambda: cycle.verify(rows, cycle.gpu_target.columns(rows), params)


def _timed(cycle: Cycle, key: tuple[object, ...], work: Callable[[], None], length: int) -> float:
    """Seconds of this work after a text of this length."""
    gpu_target, device = cycle.gpu_target, cycle.gpu_target.device
    cycle.set_length(length)
    columns = gpu_target.columns(64), 0 if cycle.draft is None else cycle.draft.columns
    _wait(device)
    started = time.perf_counter()
    gpu_target.graph_cache.run(("timing", cycle.buffers_id, columns, *key), work)
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
