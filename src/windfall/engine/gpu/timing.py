"""What passes cost on fixed buffers: recorded work of every size, replayed and timed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from windfall.core.types import SamplingParams
from windfall.costs.curves import Costs, Curve, monotone
from windfall.engine.gpu.cycle import Cycle
from windfall.engine.gpu.drafters import Sprouting
from windfall.engine.gpu.runner import GpuRunner
from windfall.policies import cheap_rows
from windfall.policies.auto import Auto
from windfall.policies.none import NoSpeculation

LENGTHS = (64, 512, 2048, 8192)
ROUNDS = 9


@torch.inference_mode()
def costs(
    resident: GpuRunner, lengths: Sequence[int] = LENGTHS, progress: Callable[[float], None] = lambda share: None
) -> Costs:
    """Verify passes of the sizes that plans ask for, behind texts of these lengths, and one draft pass."""
    judge, before, context = resident.judge, resident.judge.capacity, resident.target.context
    lengths = [length for length in lengths if context is None or length + 256 <= context] or [64]
    judge.reserve(max(lengths) + 256)
    plan = NoSpeculation().plan() if resident.drafts_on_host else Auto().plan()
    cycle = Cycle(plan, resident.drafter_form, judge)
    try:
        taken = _measured(cycle, lengths, progress)
    finally:
        judge.recorder.forget(cycle.name)
        if judge.capacity != before:  # on which memory and, in half precision, rounding depend
            judge.resize(before)
    return _folded(taken, lengths, plan.width)


def _measured(
    cycle: Cycle, lengths: Sequence[int], progress: Callable[[float], None]
) -> dict[tuple[object, ...], float]:
    """Median seconds of each piece of work, in rounds of another order each; the first, which records, counts not."""
    params = SamplingParams()
    sprouting = Sprouting(params, False, cycle.judge.dials)
    works: dict[tuple[object, ...], Callable[[], None]] = {}
    for length in lengths:
        for rows in cheap_rows.ROWS:
            works["verify", length, rows] = _verify(cycle, rows, params)
    if cycle.draft is not None:
        works["draft", 1] = lambda: _draft(cycle, sprouting, 1)
        works["draft", 4] = lambda: _draft(cycle, sprouting, 4)
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
    return lambda: cycle.verify(rows, cycle.judge.columns(rows), params)


def _draft(cycle: Cycle, sprouting: Sprouting, passes: int) -> None:
    cycle.open(sprouting)
    for _ in range(1, passes):
        cycle.expand(sprouting)


def _timed(cycle: Cycle, key: tuple[object, ...], work: Callable[[], None], length: int) -> float:
    """Seconds of this work behind a text of this length."""
    judge, device = cycle.judge, cycle.judge.device
    cycle.rewind(length)
    columns = judge.columns(64), 0 if cycle.draft is None else cycle.draft.columns
    _wait(device)
    started = time.perf_counter()
    judge.recorder.run(("timing", cycle.name, columns, *key), work)
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
