"""Times of verify and draft passes by rows and by context length, next to the time to read their bytes from memory."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from windfall.bench.gpu_internals import GpuPasses, has_fixed_rotary_positions
from windfall.bench.speed.profiled import kernels
from windfall.bench.speed.race import Progress, Settings
from windfall.core.clock import now
from windfall.drafters.base import Drafter
from windfall.drafters.head_drafter import HeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.profiling import some_tree
from windfall.model.target import Target

CONTEXT_TOKENS = 512  # the context of the passes that are timed by rows
FEW_ROWS, MANY_ROWS = 1, 64  # of the passes that are timed by context length
DRAFT_PASSES = 12  # before a verify pass is timed, so that there is a tree to choose rows from
TIMED_ROUNDS = 9  # over all passes
WARM_UP_ROUNDS = 2  # in which CUDA graphs are captured
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}  # of the copy that measures the memory bandwidth
SLEEP_CYCLES = 2_000_000  # for which the GPU waits while the host queues the work that is timed

Work = tuple[Callable[[], object], Callable[[], object]]  # preparation, and what is timed


def timed(device: torch.device, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Seconds that the device takes for this work. On a GPU the host has queued all of it before it begins."""
    before()
    if device.type != "cuda":
        started = now(device)
        work()
        return now(device) - started
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy within the device."""
    size = COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    source, goal = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    taken = [timed(device, lambda: goal.copy_(source)) for _ in range(TIMED_ROUNDS + 1)][1:]
    return 2 * size / median(taken)


def size_of(module: torch.nn.Module | None) -> int:
    """Bytes of all parameters."""
    return 0 if module is None else sum(each.numel() * each.element_size() for each in module.parameters())


def weights_read(model: Any) -> int:
    """Bytes of the weights that a pass reads: all but the input embedding, unless the output shares it."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = embedding.data_ptr() == output.data_ptr()
    return size_of(model) - (0 if tied else embedding.numel() * embedding.element_size())


def module_of(drafter: Drafter) -> torch.nn.Module | None:
    """The network of a drafter that runs on the device."""
    if isinstance(drafter, HeadDrafter):
        head: torch.nn.Module = drafter.head
        return head
    return drafter.decoder.model if isinstance(drafter, LMDrafter) else None


@torch.inference_mode()
def measure_passes(
    passes: GpuPasses, settings: Settings, speed: float, progress: Progress = lambda done, total: None
) -> dict[str, Any]:
    """Times and lower bounds of verify passes by rows and by context length, and of draft passes.

    `speed` is the memory bandwidth in bytes per second.
    """
    target = passes.runner.target
    lengths, beyond = usable_lengths(target, settings.lengths)
    base = _base_length(target, settings)
    passes = passes.prepared(max([base, *lengths]))
    sizes = {*((base, rows) for rows in settings.rows), *((n, r) for n in lengths for r in (FEW_ROWS, MANY_ROWS))}
    works: dict[Any, Work] = {}
    for length, rows in sorted(sizes):
        works["forward", length, rows] = _forward(passes, length, rows)
        if passes.cycle is not None and length == base:
            works["verify", length, rows] = _verify(passes, length, rows)
    if passes.cycle is not None:
        for count in (1, 4):
            works["draft", base, count] = _draft(passes, base, count)
    taken = _in_turns(passes.target.device, works, progress)

    def cell(length: int, rows: int) -> dict[str, Any]:
        seconds, read = taken["forward", length, rows], weights_read(target.model) + length * passes.row_bytes
        return {
            "rows": rows,
            "length": length,
            "seconds": seconds,
            "verify_seconds": taken.get(("verify", length, rows)),
            "bytes": read,
            "floor_seconds": read / speed,
            "over_floor": seconds * speed / read,
        }

    by_rows = [cell(base, rows) for rows in settings.rows]
    for each in by_rows:
        each["over_first"] = each["seconds"] / by_rows[0]["seconds"]
    by_length = [{**cell(n, rows), "beyond_context": n in beyond} for n in lengths for rows in (FEW_ROWS, MANY_ROWS)]
    for each in by_length:
        first = next(other for other in by_length if other["rows"] == each["rows"])
        each["over_first"] = each["seconds"] / first["seconds"]
    found: dict[str, Any] = {"forward": passes.forward_name, "rows": by_rows, "lengths": by_length}
    if passes.cycle is not None:
        first_pass, four = taken["draft", base, 1], taken["draft", base, 4]
        floor = size_of(module_of(passes.runner.drafter)) / speed
        found["draft"] = {
            "first_seconds": first_pass,
            "later_seconds": (four - first_pass) / 3,
            "floor_seconds": floor,
        }
    return found


@torch.inference_mode()
def count_launches(passes: GpuPasses, settings: Settings) -> dict[str, float]:
    """The number of kernels that passes launch, on CUDA. It uses the profiler, after which nothing should be timed."""
    if passes.target.device.type != "cuda":
        return {}
    base = _base_length(passes.runner.target, settings)
    passes = passes.prepared(base)

    def launched(work: Work) -> int:
        before, run = work
        before()
        run()  # the first time loads kernels
        before()
        return sum(seen.count for seen in kernels(run, passes.target.device) if not seen.copies)

    found: dict[str, float] = {
        f"verify pass, {FEW_ROWS} row": launched(_forward(passes, base, FEW_ROWS)),
        f"verify pass, {MANY_ROWS} rows": launched(_forward(passes, base, MANY_ROWS)),
    }
    if passes.cycle is not None:
        first, four = (launched(_draft(passes, base, count)) for count in (1, 4))
        found[f"all of a cycle's verifying, {MANY_ROWS} rows"] = launched(_verify(passes, base, MANY_ROWS))
        found |= {"first draft pass": first, "later draft pass": (four - first) / 3}
    return found


def _forward(passes: GpuPasses, length: int, rows: int) -> Work:
    tree = some_tree(rows, passes.runner.target.vocab_size)
    return partial(passes.place, length, tree), partial(passes.forward, rows)


def _verify(passes: GpuPasses, length: int, rows: int) -> Work:
    def before() -> None:
        passes.set_length(length)
        passes.draft(DRAFT_PASSES)

    return before, partial(passes.verify, rows)


def _draft(passes: GpuPasses, length: int, count: int) -> Work:
    return partial(passes.set_length, length), partial(passes.draft, count)


def _base_length(target: Target, settings: Settings) -> int:
    """The context length of the passes that are timed by rows."""
    if usable_lengths(target, (CONTEXT_TOKENS,))[0]:
        return CONTEXT_TOKENS
    return min(usable_lengths(target, settings.lengths)[0], default=1)


def usable_lengths(target: Target, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """The context lengths at which passes can be timed, and those of them beyond the model's context."""
    context = target.context
    inside = [n for n in lengths if context is None or n + MANY_ROWS <= context]
    beyond = [n for n in lengths if n not in inside] if has_fixed_rotary_positions(target.decoder.config) else []
    return sorted({*inside, *beyond}), beyond


def _in_turns(device: torch.device, works: dict[Any, Work], progress: Progress) -> dict[Any, float]:
    """The median seconds of each work, over rounds that each have another order."""
    found: dict[Any, list[float]] = defaultdict(list)
    rounds = WARM_UP_ROUNDS + (TIMED_ROUNDS if device.type == "cuda" else 3)
    for turn in range(rounds):
        for place, key in enumerate(random.Random(turn).sample(list(works), len(works))):
            before, work = works[key]
            seconds = timed(device, work, before)
            if turn >= WARM_UP_ROUNDS:
                found[key].append(seconds)
            progress(turn * len(works) + place + 1, rounds * len(works))
    return {key: median(own) for key, own in found.items()}
