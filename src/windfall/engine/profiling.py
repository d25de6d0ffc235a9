"""Measures what passes cost on this machine, and keeps the result for each model pair in the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from windfall import __version__
from windfall.checkpoints.find import cache_dir
from windfall.checkpoints.quiet_libs import announced
from windfall.core.clock import now
from windfall.core.errors import InputError
from windfall.core.files import make_folder, replace_text
from windfall.core.options import options_of
from windfall.core.sampling import Sampler
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, SamplingParams
from windfall.core.verify import walk
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import Costs, Curve, monotone, quickest_quarter
from windfall.costs.online import OnlineCosts
from windfall.drafters.base import Drafter
from windfall.engine.engine import Engine
from windfall.kernels.few_rows import FewRowsLinear, rows_of_kernel
from windfall.kernels.module_product import kind_of
from windfall.kernels.packed import packed_formats
from windfall.model.decoder import attention_of
from windfall.policies.none import NoSpeculation

if TYPE_CHECKING:
    from windfall.engine.gpu.runner import GpuRunner

Progress = Callable[[float], None]  # called with the finished share, 0 to 1

FORMAT = 6  # part of a profile's key; raise it when the code of a pass changes what it costs
PROFILE_WIDTHS = (1, 2, 4, 8, 16, 32)  # nodes of a draft pass
PROFILE_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of a verify pass
PROFILE_LENGTHS = (64, 512, 2048, 8192)  # tokens of context
PROFILE_SECONDS = 60.0
QUICK_PROFILE = {"rows": (1, 2, 4, 8, 16, 32), "lengths": (64, 512), "seconds": 3.0}  # before the first text
MAX_ROUNDS = 9
CHILDREN_PER_NODE = 8  # in draft passes
FIRST_PASS = 0  # stands for the width of a cycle's first draft pass
OVERHEAD_CYCLES = 5  # plain cycles a round, to measure the overhead; the first is not counted
BUSY_PREEMPTIONS_PER_SECOND = 60  # from which on other work keeps the machine busy
UNSTEADY_SPREAD = 1.5  # a pass's median over its minimum, from which on the machine is unsteady
ROWS_THAT_DOUBLE_COST = 4  # assumed of additional rows, where there was no time to measure them
WRONG_FACTOR = 2.0  # passes that are this many times faster than measured show that other work disturbed the profile
UNSTEADY_PROFILE_SECONDS = 600.0  # for which the profile of an unsteady machine is used again
TEXT = (
    "The rain fills the river, the river fills the sea, the sea fills the sky, and the sky fills the rain. "
    "So the rain fills the sea, the river fills the sky, and the"
)  # it repeats itself, so that every drafter finds something


@dataclass(frozen=True)
class Profile:
    """Measured costs, and what they were measured on."""

    costs: Costs
    about: dict[str, Any]  # machine, target, drafter, versions
    full: bool  # whether all sizes were measured
    rounds: int
    seconds: float  # that measuring took
    steady: bool  # whether other work left the machine alone; if not, the profile is used for a short time only

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "costs": self.costs.as_dict(), "c": self.costs.ratio}

    @classmethod
    def of_dict(cls, given: dict[str, Any]) -> Profile:
        fields = {name: given[name] for name in cls.__dataclass_fields__}
        return cls(**{**fields, "costs": Costs.of_dict(given["costs"])})


# ---- kept profiles


def load_or_measure(
    engine: Engine, quick: bool = True, again: bool = False, progress: Progress | None = None
) -> Profile:
    """The kept profile of this engine's target and drafter on this machine, or (`again`) a new one.

    Call it between generations: measuring uses the engine. Without `progress`, a line on stderr says that passes are
    being measured.
    """
    about = describe(engine)
    file = profile_file(about)
    known = None if again else read(file, about)
    if known is not None and (quick or known.full):
        return known
    sizes: dict[str, Any] = QUICK_PROFILE if quick else {}
    if progress is not None:
        profile = measure(engine, **sizes, progress=progress)
    else:
        with announced("Measuring what passes cost here (first run only)…"):
            profile = measure(engine, **sizes)
    with suppress(InputError):  # a cache that cannot be written to only costs time
        _write(file, profile.as_dict())
    return profile


def attach(engine: Engine) -> None:
    """Give an engine this machine's costs, and what earlier runs learnt about its drafter."""
    engine.online_costs = OnlineCosts(load_or_measure(engine).costs)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # nothing was kept, or it is damaged
        kept = json.loads(_calibration_file(engine).read_text("utf-8"))
        engine.calibrators.update({regime: Calibrator.of_dict(saved) for regime, saved in kept.items()})


def remember(engine: Engine) -> None:
    """Save what the calibrators have learnt. A profile that cycles proved wrong is marked, to be measured again."""
    learnt = {regime: calibrator.as_dict() for regime, calibrator in engine.calibrators.items()}
    with suppress(InputError):
        _write(_calibration_file(engine), learnt)
        if engine.online_costs.overestimate > WRONG_FACTOR:
            about = describe(engine)
            profile = read(profile_file(about), about)
            if profile is not None and profile.steady:
                _write(profile_file(about), replace(profile, steady=False).as_dict())


def profile_file(about: dict[str, Any]) -> Path:
    """Where the profile of this machine and model pair is kept; another version of anything is another file."""
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{key}.json"


def _calibration_file(engine: Engine) -> Path:
    return profile_file(describe(engine)).with_suffix(".calibration.json")


def read(file: Path, about: dict[str, Any]) -> Profile | None:
    """A kept profile; None if there is none, it is damaged, or it is an old one of an unsteady machine."""
    try:
        profile, age = Profile.of_dict(json.loads(file.read_text("utf-8"))), time.time() - file.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return profile if profile.about == about and (profile.steady or age < UNSTEADY_PROFILE_SECONDS) else None


def _write(file: Path, content: dict[str, Any]) -> None:
    make_folder(file.parent)
    replace_text(file, json.dumps(content, indent=1))


def describe(engine: Engine) -> dict[str, Any]:
    """Everything on which the time of a pass depends."""
    target = engine.target
    return {
        "machine": machine(target.device),
        "target": {
            "name": target.name,
            **_shape(target.model),
            "dtype": str(target.decoder.dtype),
            "device": str(target.device),
            "attention": attention_of(target.model),
            "graphs": engine.gpu_runner is not None,
            "exact": engine.exact_passes,
            "few_rows": str(rows_of_kernel()) if target.device.type == "cpu" else "",
            "packed": packed_formats(target.model),
        },
        "drafter": _drafter(engine.drafter),
        "versions": {
            "profile": FORMAT,
            "windfall": __version__,
            "torch": version("torch"),
            "transformers": transformers.__version__,
        },
    }


def machine(device: torch.device) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"cpu": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu}


def _cpu() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _shape(model: Any) -> dict[str, Any]:
    config = model.config.get_text_config()
    kinds = {kind_of(module) for module in model.modules() if hasattr(module, "in_features")}
    special = sorted(kinds - {nn.Linear.__name__, FewRowsLinear.__name__})  # quantised, for example
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        **({"linear": special} if special else {}),
    }


def _drafter(drafter: Drafter) -> dict[str, Any]:
    kind, decoder = type(drafter), getattr(drafter, "decoder", None)
    settings = {name: _plain(getattr(drafter, name)) for name in options_of(kind)}
    found = {} if decoder is None else {"found": _shape(decoder.model)}  # the model behind a path
    return {"class": f"{kind.__module__}.{kind.__qualname__}", **settings, **found}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and value:
        return _plain(value[0])
    if hasattr(value, "get_output_embeddings"):
        return _shape(value)
    if hasattr(value, "parameters"):  # a head
        sizes = [parameter.numel() for parameter in value.parameters()]
        return {"class": type(value).__name__, "parameters": sum(sizes), "tensors": len(sizes)}
    return value if value is None or isinstance(value, bool | int | float) else str(value)


# ---- measuring


@torch.inference_mode()
def measure(
    engine: Engine,
    widths: Sequence[int] = PROFILE_WIDTHS,
    rows: Sequence[int] = PROFILE_ROWS,
    lengths: Sequence[int] = PROFILE_LENGTHS,
    seconds: float = PROFILE_SECONDS,
    progress: Progress = lambda share: None,
) -> Profile:
    """Time the passes of this engine's target and drafter for about this many seconds.

    Every round times each size once, in a new order, so that a slow moment does not hit one size alone. Of each size
    the fastest quarter counts, and costs never fall with size.
    """
    budget = Budget(seconds, progress)
    if engine.gpu_runner is not None:
        return _measure_gpu(engine, engine.gpu_runner, budget)
    full = tuple(rows) == PROFILE_ROWS
    rows, lengths = _within(engine.target.context, rows, lengths)
    verifies = VerifyPasses(engine, rows, lengths)
    drafts: dict[int, list[float]] = defaultdict(list)
    overheads: list[float] = []
    text = _text(engine)
    try:
        while budget.another_round():
            verifies.round(budget)
            for width, taken in _draft_passes(engine, text, widths if budget.rounds % 2 else widths[::-1]):
                drafts[width].append(taken)
                if budget.spent:
                    break
            for taken in _overheads(engine, text):
                overheads.append(taken)
                if budget.spent:
                    break
    finally:
        engine.target.decoder.reset(0)
    curve, opening = _draft_costs(drafts)
    costs = Costs(curve, verifies.curves(), median(overheads), opening)
    steady = budget.undisturbed and verifies.spread < UNSTEADY_SPREAD
    return Profile(costs, describe(engine), full, budget.rounds, budget.elapsed, steady)


def _measure_gpu(engine: Engine, runner: GpuRunner, budget: Budget) -> Profile:
    """The same where passes are CUDA graphs."""
    from windfall.engine.gpu.timing import costs

    found = costs(runner, progress=budget.progress)
    if runner.drafter_unsupported:
        text, drafts = _text(engine), defaultdict(list)
        try:
            for _ in range(MAX_ROUNDS // 2):
                for width, seconds in _draft_passes(engine, text, PROFILE_WIDTHS):
                    drafts[width].append(seconds)
        finally:
            engine.target.decoder.reset(0)
        curve, opening = _draft_costs(drafts)
        found = replace(found, drafts=curve, opening=opening)
    budget.progress(1.0)
    return Profile(found, describe(engine), True, 1, budget.elapsed, True)


def _draft_costs(samples: dict[int, list[float]]) -> tuple[Curve, float]:
    """Seconds of draft passes by width, and what a cycle's first pass takes in addition."""
    first = quickest_quarter(samples[FIRST_PASS])
    widths = sorted(set(samples) - {FIRST_PASS}) or [1]
    seconds = monotone([quickest_quarter(samples.get(width, [first])) for width in widths])
    return Curve(tuple(widths), tuple(seconds)), max(first - seconds[0], 0.0)


def _within(context: int | None, rows: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """The sizes that fit into the target's context."""
    if context is None:
        return list(rows), list(lengths)
    fitting = [n for n in rows if n <= max(context // 2, 1)]
    room = context - max(fitting)
    return fitting, [length for length in lengths if length <= room] or [max(room // 2, 1)]


def _text(engine: Engine) -> list[int]:
    """A text that repeats itself, as token ids."""
    target = engine.target
    if target.tokenizer is not None:
        ids = [token for token in target.tokenizer(TEXT).input_ids if token < target.vocab_size]
    else:
        ids = [place * place % 23 % target.vocab_size for place in range(48)]
    return ids[-max((target.context or 512) // 2, 2) :]


class Budget:
    """The time that is left for further rounds, and whether other processes took some of it."""

    def __init__(self, seconds: float, progress: Progress):
        self.seconds, self.progress = seconds, progress
        self.rounds = 0
        self._started, self._preempted = time.perf_counter(), _preemptions()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    @property
    def spent(self) -> bool:
        return self.elapsed > self.seconds

    @property
    def undisturbed(self) -> bool:
        return _preemptions() - self._preempted < BUSY_PREEMPTIONS_PER_SECOND * self.elapsed

    def show_progress(self) -> None:
        self.progress(min(max(self.elapsed / self.seconds, (self.rounds - 1) / MAX_ROUNDS), 1.0))

    def another_round(self) -> bool:
        """Begin another round if there is time for one as long as those before; there always is for the first."""
        if self.rounds and (self.rounds == MAX_ROUNDS or self.elapsed * (1 + 1 / self.rounds) > self.seconds):
            self.progress(1.0)
            return False
        self.rounds += 1
        return True


def _preemptions() -> int:
    """The number of times that other processes took a core from our threads; 0 where the system does not count."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class VerifyPasses:
    """Times target passes with everything that a cycle does around them: mask, forward, draw, walk, commit."""

    def __init__(self, engine: Engine, rows: Sequence[int], lengths: Sequence[int]):
        self.target, self.taps = engine.target, engine.drafter.taps
        self.trees = {size: some_tree(size, self.target.vocab_size) for size in rows}
        self.sizes = [(length, size) for length in lengths for size in rows]
        self.samples: dict[tuple[int, int], list[float]] = defaultdict(list)

    def round(self, budget: Budget) -> None:
        """Time every size once. Sizes for which the first round leaves no time are not measured at all."""
        first = budget.rounds == 1
        self.target.prefill([[0, 0, 0]], self.taps)
        self.target.decoder.cache.reserve(max(length for length, _ in self.sizes) + max(self.trees))
        if first:
            for size in (self.sizes[0], self.sizes[-1]):
                self._time(*size)  # warm up
        sizes = self.sizes if first else random.Random(budget.rounds).sample(self.sizes, len(self.sizes))
        for size in sizes:
            if first and budget.spent and self.samples:
                break
            self.samples[size].append(self._time(*size))
            budget.show_progress()
        self.sizes = [size for size in self.sizes if size in self.samples]

    def _time(self, length: int, size: int) -> float:
        tree, device = self.trees[size], self.target.device
        self.target.decoder.cache.lengths = [length]  # what the rows of the cache hold does not matter
        started = now(device)
        logits = self.target.score([tree])[0].logits
        verdict = walk(tree, Sampler(SamplingParams(), length).draws(tree, logits, []))
        self.target.commit([verdict.path])
        return now(device) - started

    @property
    def spread(self) -> float:
        """How far the times of equal passes lie apart: their median over their minimum, typically."""
        return median(median(taken) / min(taken) for taken in self.samples.values())

    def curves(self) -> tuple[tuple[int, Curve], ...]:
        """Seconds by rows at each length that was measured in full; they rise with both."""
        lengths = sorted({length for length, _ in self.sizes})
        rows = [size for length, size in self.sizes if length == lengths[0]]
        lengths = [length for length in lengths if (length, rows[-1]) in self.samples]
        grid = [monotone([quickest_quarter(self.samples[length, size]) for size in rows]) for length in lengths]
        grid = [list(column) for column in zip(*map(monotone, zip(*grid, strict=True)), strict=True)]
        if len(rows) == 1:
            rows, grid = [rows[0], rows[0] + ROWS_THAT_DOUBLE_COST], [[one, 2 * one] for (one,) in grid]
        return tuple((length, Curve(tuple(rows), tuple(own))) for length, own in zip(lengths, grid, strict=True))


def some_tree(size: int, vocabulary: int) -> DraftTree:
    """A tree of this many nodes, every node with two children."""
    tree = DraftTree.root(0)
    for node in range(1, size):
        token = torch.tensor([node % vocabulary])
        tree = tree.extend(torch.tensor([(node - 1) // 2]), token, torch.zeros(1), torch.tensor([(node - 1) % 2]))
    return tree


def _draft_passes(engine: Engine, text: list[int], widths: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Width and seconds of the draft passes of one cycle: its first pass, then one of each width.

    A pass has fewer nodes where the tree has fewer.
    """
    drafter, device = engine.drafter, engine.target.device
    hidden = engine.target.prefill([text], drafter.taps) if drafter.taps else None
    drafter.start([text], hidden, [None])
    root, expanded = Grow(torch.tensor([0]), k=max(widths)), 0
    trees = drafter.expand(drafter.begin([text[-1]]), [root])  # a first cycle, which takes in the text
    bonus = int(trees[0].tokens[min(1, len(trees[0]) - 1)])
    drafter.commit(trees, [torch.tensor([0])], [bonus], hidden and [hidden[0][-1:]])
    if hidden is not None:  # a cycle's first draft pass follows a target pass, which fills the caches of a CPU
        engine.target.score([DraftTree.root(text[-1])])
        engine.target.commit([torch.tensor([0])])
    trees = drafter.begin([bonus])
    started = now(device)
    trees = drafter.expand(trees, [root])
    yield FIRST_PASS, now(device) - started
    for width in widths:
        nodes = torch.arange(expanded + 1, len(trees[0]))[:width]
        if not len(nodes):
            break
        expanded += len(nodes)
        started = now(device)
        trees = drafter.expand(trees, [Grow(nodes, k=CHILDREN_PER_NODE)])
        yield len(nodes), now(device) - started


def _overheads(engine: Engine, text: list[int]) -> Iterator[float]:
    """Seconds of plain cycles besides their target pass: the loop, the drafter's commit, the text."""
    last, params = None, SamplingParams(max_new_tokens=OVERHEAD_CYCLES, eos=())
    for steps in engine.run([text[-8:]], [params], trial_policy=NoSpeculation()):
        taken = time.perf_counter()
        if last is not None:
            yield max(taken - last - steps[0].seconds.verify, 0.0)
        last = time.perf_counter()
