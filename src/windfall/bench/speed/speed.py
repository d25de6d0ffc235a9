"""`windfall bench speed`: times of passes, peak memory and speed of methods, all measured in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from windfall.bench.gpu_internals import GpuPasses
from windfall.bench.memory import clear, peak_apart
from windfall.bench.methods import DrafterSpec, Method
from windfall.bench.runner import Case, Contender, assemble, first_questions
from windfall.bench.speed.passes import (
    bandwidth,
    count_launches,
    measure_passes,
    module_of,
    size_of,
    weights_read,
)
from windfall.bench.speed.race import LOOKUP_TOKENS, Race, Settings, entries, timed_generate
from windfall.bench.tasks import Prompt
from windfall.drafters.base import Drafter
from windfall.drafters.head_drafter import HeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target

METHODS = ("none", "beam:depth=7:k=10:nodes=60", "auto", "ddd", "gt", "talon", "opt-tree", "chain:depth=7")


@dataclass
class Result:
    """What was measured so far, as plain data."""

    target: str
    provenance: dict[str, Any]
    settings: dict[str, Any]
    memory: dict[str, Any] = field(default_factory=dict)  # bandwidth and sizes
    passes: dict[str, Any] = field(default_factory=dict)
    methods: list[dict[str, Any]] = field(default_factory=list)
    profiles: dict[str, Any] = field(default_factory=dict)  # the costs that policies used
    finished: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {"what": "speed of passes and methods", **asdict(self)}


def peak_of(target: Target, method: Method, drafter: DrafterSpec, case: Case, settings: Settings) -> int:
    """The peak bytes of a CUDA device that this method needs for one answer, weights included."""
    loaded = size_of(drafter.model) if isinstance(drafter, Ready) and not method.plain and not method.drafter else 0

    def make() -> Engine:
        (contender,) = assemble([method], target, drafter, settings.couplings[0], gpu_options=settings.gpu_options)
        contender.engine.policy = method.make()
        return contender.engine

    return peak_apart(target, make, case.ids, case.params) + loaded


def transformers_peak(target: Target, case: Case, assistant: Any) -> int:
    """The same for transformers' own loops, including the weights of an assistant."""
    clear(target.device)
    before = torch.cuda.memory_allocated(target.device)
    torch.cuda.reset_peak_memory_stats(target.device)
    timed_generate(target, case.ids, case.params, assistant)
    helper = assistant if isinstance(assistant, torch.nn.Module) else None
    return int(torch.cuda.max_memory_allocated(target.device) - before) + size_of(target.model) + size_of(helper)


@dataclass(frozen=True)
class Ready(DrafterSpec):
    """A drafter that is already loaded."""

    model: Any = None

    def make(self, trust_remote_code: bool = False) -> Drafter:
        from windfall.engine.loading import as_drafter

        return as_drafter(self.model)


def widened(target: Target, drafter: DrafterSpec, like: str) -> tuple[Target, DrafterSpec]:
    """Target and head zero-padded to a larger pair's shape; a drafter that is no head stays as it is."""
    from windfall.bench.widen import widen, widen_pair

    made, name = drafter.make(), target.name.rstrip("/").rpartition("/")[2]
    if not isinstance(made, HeadDrafter):
        return Target(widen(target.model, like, name), target.tokenizer), drafter
    made.attach(target)
    pair = widen_pair(target.model, made.head, like, name)
    return Target(pair.model, target.tokenizer), Ready(drafter.label, {}, pair.head)


def measure(
    result: Result,
    target: Target,
    methods: Sequence[Method],
    drafter: DrafterSpec,
    prompts: Sequence[Prompt],
    settings: Settings,
    attach: Callable[[Sequence[Contender]], dict[str, Any]],
    keep: Callable[[Result], None],
    progress: Callable[[str, int, int], None] = lambda part, done, total: None,
    trust_remote_code: bool = False,
) -> None:
    """Measure everything into the result, and call `keep` with it after each part.

    `attach` gives the contenders their costs, and returns them.
    """
    contenders = assemble(methods, target, drafter, settings.couplings[0], trust_remote_code, settings.gpu_options)
    drafting = next((each.engine for each in contenders if not each.method.plain), contenders[0].engine)
    assistant = drafting.drafter.decoder.model if isinstance(drafting.drafter, LMDrafter) else LOOKUP_TOKENS
    eos = () if settings.ignore_eos else None
    asked = prompts, contenders[0].engine, settings.seed, settings.prompt_tokens
    cases = first_questions(*asked, max_new_tokens=settings.max_new_tokens, eos=eos)
    race = Race(target, entries(contenders, settings, assistant), cases, settings)

    speed = bandwidth(target.device)
    passes, reason = GpuPasses.of(drafting, settings.gpu_options)
    result.memory = {
        "bandwidth": speed,
        "target_bytes": size_of(target.model),
        "target_bytes_read": weights_read(target.model),
        "drafter_bytes": size_of(module_of(drafting.drafter)),
        "row_bytes": None if passes is None else passes.row_bytes,
    }
    if passes is None:
        result.passes = {"skipped": reason}
    else:
        result.passes = measure_passes(passes, settings, speed, lambda *done: progress("Passes", *done))
    del passes
    keep(result)

    longest = max(cases, key=lambda case: len(case.ids))
    for place, method in enumerate(methods if target.device.type == "cuda" else ()):
        race.peaks[method.label] = peak_of(target, method, drafter, longest, settings)
        progress("Memory", place + 1, len(methods))
    if target.device.type == "cuda" and settings.hf:
        for entry in (each for each in race.entries if each.transformers):
            race.peaks[entry.label] = transformers_peak(target, longest, entry.assistant)
    result.profiles = attach(contenders)
    for _ in race.run(lambda *done: progress("Methods", *done)):
        result.methods = race.rows
        keep(result)
    if (again := GpuPasses.of(drafting, settings.gpu_options)[0]) is not None:
        result.passes["launches"] = count_launches(again, settings)
    result.finished = True
    keep(result)
