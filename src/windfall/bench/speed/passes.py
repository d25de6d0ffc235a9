"""Passes by rows and by context against the memory's limit, and how many launches they are."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from windfall.bench.speed.profiled import kernels
from windfall.bench.speed.race import Progress, Settings
from windfall.core.clock import now
from windfall.core.types import SamplingParams
from windfall.drafters.base import Drafter
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.gpu.cycle import Cycle
from windfall.engine.gpu.drafters import Sprouting
from windfall.engine.gpu.rope import steady
from windfall.engine.gpu.runner import GpuRunner
from windfall.engine.gpu.target import MAX_VERIFY_ROWS, GpuTarget
from windfall.engine.profiling import some_tree
from windfall.model.target import Target
from windfall.policies.auto import Auto

CONTEXT = 512  # behind which passes are timed by rows
FEW, MANY = 1, 64  # rows of the passes timed by context length
DEPTH = 12  # draft passes before a verify pass is timed, so that there is a tree to choose from
PASSES = 9  # rounds over all passes
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes of the copy that measures the memory
AHEAD = 2_000_000  # cycles for which the GPU waits while the host queues the work that is timed


def timed(device: torch.device, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Seconds that the device takes for this work. On a GPU the host has queued all of it before it begins."""
    before()
    if device.type != "cuda":
        started = now(device)
        work()
        return now(device) - started
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(AHEAD)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def bandwidth(device: torch.device, rounds: int = PASSES) -> float:
    """Bytes read and written per second by a large copy within the device."""
    size = COPIED.get(device.type, COPIED["cpu"])
    source, goal = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    taken = [timed(device, lambda: goal.copy_(source)) for _ in range(rounds + 1)][1:]
    return 2 * size / median(taken)


def size_of(module: torch.nn.Module | None) -> int:
    """Bytes of all parameters."""
    return 0 if module is None else sum(each.numel() * each.element_size() for each in module.parameters())


def weights_read(model: Any) -> int:
    """Bytes of the weights that a pass reads: all but the input embedding, unless it is the output's, too."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tied = embedding.data_ptr() == output.data_ptr()
    return size_of(model) - (0 if tied else embedding.numel() * embedding.element_size())


def row_size(judge: GpuTarget) -> int:
    """Bytes of a token's keys and values in all layers."""
    layers, heads, width = judge.forward.shape
    return int(2 * layers * heads * width * judge.dtype.itemsize)


def module_of(drafter: Drafter) -> torch.nn.Module | None:
    """The network of a drafter that runs on the device."""
    if isinstance(drafter, FeatureHeadDrafter):
        return drafter.head
    return drafter.decoder.model if isinstance(drafter, LMDrafter) else None


@dataclass(frozen=True)
class Bench:
    """Passes on fixed buffers, to be timed."""

    judge: GpuTarget
    cycle: Cycle | None  # where the drafter works on the device

    @classmethod
    def of(cls, resident: GpuRunner, longest: int) -> Bench:
        resident.judge.reserve(longest + 2 * MAX_VERIFY_ROWS)
        cycle = None if resident.drafts_on_host else Cycle(Auto().plan(), resident.drafter, resident.judge)
        return cls(resident.judge, cycle)

    def at(self, length: int) -> None:
        """Behind a text of this length, with nothing drafted."""
        self.judge.length.fill_(length)
        self.judge.known = length
        if self.cycle is not None:
            self.cycle.rewind(length)

    def forward(self, rows: int) -> None:
        """The target's forward alone, over the rows that were placed."""
        judge = self.judge
        columns = judge.columns(rows)
        judge.recorder.refresh(("score", rows, columns, judge.capacity), lambda: judge.score(rows, columns))

    def verify(self, rows: int) -> None:
        """All that a cycle does behind its last draft pass: choose, forward, draw, walk, move."""
        cycle = self.cycle
        assert cycle is not None
        columns, params = cycle.judge.columns(rows), SamplingParams()
        key = ("speed", cycle.name, "verify", rows, columns, cycle.judge.capacity)
        cycle.judge.recorder.run(key, lambda: cycle.verify(rows, columns, params))

    def draft(self, passes: int) -> None:
        """The first draft passes of a cycle."""
        cycle = self.cycle
        assert cycle is not None
        sprouting = Sprouting(SamplingParams(), False, cycle.judge.dials)

        def work() -> None:
            cycle.open(sprouting)
            for _ in range(1, passes):
                cycle.expand(sprouting)

        cycle.judge.recorder.run(("speed", cycle.name, "draft", passes, cycle.judge.capacity), work)


@torch.inference_mode()
def measure_passes(
    resident: GpuRunner, settings: Settings, speed: float, progress: Progress = lambda done, total: None
) -> dict[str, Any]:
    """Times and floors of verify passes by rows and by context length, and of draft passes."""
    lengths, beyond = usable_lengths(resident.target, settings.lengths)
    base = _base(resident.target, settings)
    bench, device = Bench.of(resident, max([base, *lengths])), resident.judge.device
    trees = {rows: some_tree(rows, resident.target.vocab_size) for rows in {*settings.rows, FEW, MANY}}
    sizes = sorted({*((base, rows) for rows in settings.rows), *((n, rows) for n in lengths for rows in (FEW, MANY))})
    works: dict[tuple[Any, ...], tuple[Callable[[], Any], Callable[[], Any]]] = {}
    for length, rows in sizes:
        works["forward", length, rows] = _placed(bench, length, trees[rows]), partial(bench.forward, rows)
        if bench.cycle is not None and length == base:
            works["verify", length, rows] = _grown(bench, length), partial(bench.verify, rows)
    if bench.cycle is not None:
        for passes in (1, 4):
            works["draft", base, passes] = partial(bench.at, base), partial(bench.draft, passes)
    taken = _in_turns(device, works, progress)
    return _passes_told(resident, settings, taken, speed, base, lengths, beyond)


@torch.inference_mode()
def count_launches(resident: GpuRunner, settings: Settings) -> dict[str, float]:
    """Kernels that passes launch, where the device tells; by the profiler, behind which nothing should be timed."""
    if resident.judge.device.type != "cuda":
        return {}
    base = _base(resident.target, settings)
    bench = Bench.of(resident, base)

    def launched(before: Callable[[], object], work: Callable[[], object]) -> int:
        before()
        work()  # the first time loads kernels
        before()
        return sum(seen.count for seen in kernels(work, resident.judge.device) if not seen.copies)

    def placed(rows: int) -> Callable[[], None]:
        return _placed(bench, base, some_tree(rows, resident.target.vocab_size))

    told: dict[str, float] = {
        f"verify pass, {FEW} row": launched(placed(FEW), partial(bench.forward, FEW)),
        f"verify pass, {MANY} rows": launched(placed(MANY), partial(bench.forward, MANY)),
    }
    if bench.cycle is not None:
        first, four = (launched(partial(bench.at, base), partial(bench.draft, passes)) for passes in (1, 4))
        told[f"all of a cycle's verifying, {MANY} rows"] = launched(_grown(bench, base), partial(bench.verify, MANY))
        told |= {"first draft pass": first, "later draft pass": (four - first) / 3}
    return told


def _base(target: Target, settings: Settings) -> int:
    """The context behind which passes are timed by rows."""
    if usable_lengths(target, (CONTEXT,))[0]:
        return CONTEXT
    return min(usable_lengths(target, settings.lengths)[0], default=1)


def usable_lengths(target: Target, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """The context lengths that passes can be timed behind, and those of them that the model was not made for."""
    context = target.context
    inside = [n for n in lengths if context is None or n + MANY <= context]
    rotary = getattr(target.decoder.config, "rope_parameters", None) is not None and steady(target.decoder.config)
    beyond = [n for n in lengths if n not in inside] if rotary else []
    return sorted({*inside, *beyond}), beyond


def _placed(bench: Bench, length: int, tree: Any) -> Callable[[], None]:
    def before() -> None:
        bench.at(length)
        bench.judge.place(tree)

    return before


def _grown(bench: Bench, length: int) -> Callable[[], None]:
    def before() -> None:
        bench.at(length)
        bench.draft(DEPTH)

    return before


def _in_turns(device: torch.device, works: dict[Any, Any], progress: Progress) -> dict[Any, float]:
    """The median seconds of each, after rounds in another order each; the first two, which record, do not count."""
    found: dict[Any, list[float]] = defaultdict(list)
    rounds = PASSES if device.type == "cuda" else 3
    for turn in range(rounds + 2):
        for place, key in enumerate(random.Random(turn).sample(list(works), len(works))):
            before, work = works[key]
            seconds = timed(device, work, before)
            if turn > 1:
                found[key].append(seconds)
            progress(turn * len(works) + place + 1, (rounds + 2) * len(works))
    return {key: median(own) for key, own in found.items()}


def _passes_told(
    resident: GpuRunner,
    settings: Settings,
    taken: dict[Any, float],
    speed: float,
    base: int,
    lengths: Sequence[int],
    beyond: Sequence[int],
) -> dict[str, Any]:
    judge, weights = resident.judge, weights_read(resident.target.model)
    drafting = module_of(resident.drafter)

    def cell(length: int, rows: int) -> dict[str, Any]:
        seconds, read = taken["forward", length, rows], weights + length * row_size(judge)
        verify = taken.get(("verify", length, rows))
        floor = read / speed
        return {"rows": rows, "length": length, "seconds": seconds, "verify_seconds": verify, "bytes": read,
                "floor_seconds": floor, "over_floor": seconds / floor}  # fmt: skip

    by_rows = [cell(base, rows) for rows in settings.rows]
    by_length = [{**cell(n, rows), "beyond_context": n in beyond} for n in lengths for rows in (FEW, MANY)]
    for table in (by_rows, by_length):
        for each in table:
            each["over_first"] = each["seconds"] / next(x["seconds"] for x in table if _same_series(x, each))
    told: dict[str, Any] = {"forward": type(judge.forward).__name__, "rows": by_rows, "lengths": by_length}
    if (four := taken.get(("draft", base, 4))) is not None:
        first, floor = taken["draft", base, 1], size_of(drafting) / speed
        told["draft"] = {"first_seconds": first, "later_seconds": (four - first) / 3, "floor_seconds": floor}
    return told


def _same_series(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether one is a point of the curve that the other belongs to: all of a table by rows, or one number of rows."""
    return "beyond_context" not in one or one["rows"] == other["rows"]
