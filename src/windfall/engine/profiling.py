"""Measures what passes cost here, and keeps the result per machine and model pair in the cache folder."""

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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import transformers

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
from windfall.model.decoder import attention_of
from windfall.model.target import Target
from windfall.policies.none import NoSpeculation

if TYPE_CHECKING:
    from windfall.engine.gpu.runner import GpuRunner

Progress = Callable[[float], None]  # told the finished share, 0 to 1

FORMAT = 2  # raise it when the code of a pass changes what it costs: older profiles are then left alone
WIDTHS = (1, 2, 4, 8, 16, 32)
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LENGTHS = (64, 512, 2048, 8192)
SECONDS = 60.0
QUICK = {"rows": (1, 2, 4, 8, 16, 32), "lengths": (64, 512), "seconds": 3.0}  # before a first text, which corrects it
ROUNDS = 9  # at the most
CHILDREN = 8  # of a node, in draft passes
OPENING = 0  # stands for the width of a cycle's first draft pass
CYCLES = 5  # plain ones a round, for the overhead; the first is not counted
BUSY = 60  # times a second that our threads lose their core, from which on the machine is busy with other work
UNSTEADY = 1.5  # a point's median over its least, in the middle of all points, from which on the machine is unsteady
UNSEEN = 4  # more rows are taken to double the cost of a pass, where a busy machine left no time to see
WRONG = 2.0  # times quicker than measured: the profile was made beside other work
ROUGH = 600.0  # seconds for which a profile of an unsteady machine is used again
TEXT = (
    "The rain fills the river, the river fills the sea, the sea fills the sky, and the sky fills the rain. "
    "So the rain fills the sea, the river fills the sky, and the"
)  # of a kind in which every drafter finds something


@dataclass(frozen=True)
class Profile:
    """Measured costs, and what they were measured on."""

    costs: Costs
    about: dict[str, Any]  # machine, target, drafter, versions
    full: bool  # whether all sizes were measured
    rounds: int
    seconds: float  # that measuring took
    steady: bool  # whether the machine had nothing else to do; if not, the costs are rough and soon forgotten

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

    Call it between generations: measuring uses the engine. Without `progress` a line on stderr says what goes on.
    """
    about = describe(engine)
    file = profile_file(about)
    known = None if again else read(file, about)
    if known is not None and (quick or known.full):
        return known
    sizes: dict[str, Any] = QUICK if quick else {}
    if progress is not None:
        profile = measure(engine, **sizes, progress=progress)
    else:
        with announced("Measuring what passes cost here (first run only)…"):
            profile = measure(engine, **sizes)
    with suppress(InputError):  # a cache that cannot be written to only costs time
        write(profile, file)
    return profile


def attach(engine: Engine) -> None:
    """Give an engine this machine's costs, and what was learnt about its drafter before."""
    engine.online_costs = OnlineCosts(load_or_measure(engine).costs)
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # nothing was kept, or it is damaged
        kept = json.loads(calibration_file(engine).read_text("utf-8"))
        engine.calibrators.update({regime: Calibrator.of_dict(saved) for regime, saved in kept.items()})


def remember(engine: Engine) -> None:
    """Keep what the calibrators have learnt, beside the profile, which is soon forgotten if cycles proved it wrong."""
    kept = {regime: calibrator.as_dict() for regime, calibrator in engine.calibrators.items()}
    with suppress(InputError):
        _keep(calibration_file(engine), kept)
        if engine.online_costs.overestimate > WRONG:
            about = describe(engine)
            profile = read(profile_file(about), about)
            if profile is not None and profile.steady:
                write(replace(profile, steady=False), profile_file(about))


def calibration_file(engine: Engine) -> Path:
    return profile_file(describe(engine)).with_suffix(".calibration.json")


def profile_file(about: dict[str, Any]) -> Path:
    """Where the profile of this machine and model pair is kept; another version of anything is another file."""
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{key}.json"


def read(file: Path, about: dict[str, Any]) -> Profile | None:
    """A kept profile; None if there is none, it is damaged, or it was rough and is old."""
    try:
        profile, age = Profile.of_dict(json.loads(file.read_text("utf-8"))), time.time() - file.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return profile if profile.about == about and (profile.steady or age < ROUGH) else None


def write(profile: Profile, file: Path) -> None:
    _keep(file, profile.as_dict())


def _keep(file: Path, found: dict[str, Any]) -> None:
    make_folder(file.parent)
    replace_text(file, json.dumps(found, indent=1))


def describe(engine: Engine) -> dict[str, Any]:
    """Everything that a pass's time depends on."""
    target = engine.target
    return {
        "machine": machine(target.device),
        "target": {
            "name": target.name,
            **_shape(target.model),
            "dtype": str(target.decoder.dtype),
            "device": str(target.device),
            "attention": attention_of(target.model),
            "graphs": engine.resident is not None,
            "exact": engine.launch.exact,
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
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
    }


def _drafter(drafter: Drafter) -> dict[str, Any]:
    kind, decoder = type(drafter), getattr(drafter, "decoder", None)
    settings = {name: _plain(getattr(drafter, name)) for name in options_of(kind)}
    found = {} if decoder is None else {"found": _shape(decoder.model)}  # what a path, or none, stands for
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
    widths: Sequence[int] = WIDTHS,
    rows: Sequence[int] = ROWS,
    lengths: Sequence[int] = LENGTHS,
    seconds: float = SECONDS,
    progress: Progress = lambda share: None,
    stepped: bool = False,
) -> Profile:
    """Time the passes of this engine's target and drafter for about this many seconds.

    Rounds over all sizes, in another order each time, so that a slow moment hits no size alone; of each size the
    quickest quarter counts, and costs never fall with size. `stepped`: passes run in graphs of these sizes.
    """
    full = tuple(rows) == ROWS
    clock = Clock(seconds, progress)
    if engine.resident is not None:
        return _measure_resident(engine, engine.resident, clock)
    rows, lengths = _within(engine.target.context, rows, lengths)
    verifies = VerifyPasses(engine.target, rows, lengths)
    drafts: dict[int, list[float]] = defaultdict(list)
    overheads: list[float] = []
    text = _text(engine)
    with _state_kept(engine):
        while clock.another_round():
            verifies.round(clock)
            for width, taken in _draft_passes(engine, text, widths if clock.rounds % 2 else widths[::-1]):
                drafts[width].append(taken)
                if clock.over:
                    break
            for taken in _overheads(engine, text):
                overheads.append(taken)
                if clock.over:
                    break
    first = quickest_quarter(drafts.pop(OPENING))
    drafted = sorted(drafts) or [1]
    times = monotone([quickest_quarter(drafts.get(width, [first])) for width in drafted])
    opening = max(first - times[0], 0.0)
    costs = Costs(Curve(tuple(drafted), tuple(times), stepped), verifies.curves(stepped), median(overheads), opening)
    steady = clock.undisturbed and verifies.spread < UNSTEADY
    return Profile(costs, describe(engine), full, clock.rounds, clock.elapsed, steady)


def _measure_resident(engine: Engine, resident: GpuRunner, clock: Clock) -> Profile:
    """The same where passes are recorded work on the device."""
    from windfall.engine.gpu.timing import costs

    found = costs(resident, progress=clock.progress)
    if resident.drafts_on_host:  # its passes run on the host
        text, taken = _text(engine), defaultdict(list)
        with _state_kept(engine):
            for _ in range(ROUNDS // 2):
                for width, seconds in _draft_passes(engine, text, WIDTHS):
                    taken[width].append(seconds)
        first = quickest_quarter(taken.pop(OPENING))
        widths = tuple(sorted(taken)) or (1,)
        times = monotone([quickest_quarter(taken.get(width, [first])) for width in widths])
        found = replace(found, drafts=Curve(widths, tuple(times)), opening=max(first - times[0], 0.0))
    clock.progress(1.0)
    return Profile(found, describe(engine), True, 1, clock.elapsed, True)


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


@contextmanager
def _state_kept(engine: Engine) -> Iterator[None]:
    """Measure plain cycles on the engine, and leave it as it was, however it ends."""
    policy, engine.policy = engine.policy, NoSpeculation()
    engine.target.decoder.taps = engine.drafter.taps
    try:
        yield
    finally:
        engine.policy = policy
        engine.target.decoder.reset(0)


class Clock:
    """How much time is left for further rounds, and whether others took some of it."""

    def __init__(self, seconds: float, progress: Progress):
        self.seconds, self.progress = seconds, progress
        self.rounds = 0
        self._started, self._preempted = time.perf_counter(), preemptions()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._started

    @property
    def over(self) -> bool:
        return self.elapsed > self.seconds

    @property
    def undisturbed(self) -> bool:
        return preemptions() - self._preempted < BUSY * self.elapsed

    def tick(self) -> None:
        self.progress(min(max(self.elapsed / self.seconds, (self.rounds - 1) / ROUNDS), 1.0))

    def another_round(self) -> bool:
        """Whether a round more, as long as those before, is in time; the first always is."""
        if self.rounds and (self.rounds == ROUNDS or self.elapsed * (1 + 1 / self.rounds) > self.seconds):
            self.progress(1.0)
            return False
        self.rounds += 1
        return True


def preemptions() -> int:
    """How often our threads had to give up their core to someone else; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


class VerifyPasses:
    """Times target passes with all that a cycle does to them: mask, forward, draw, walk, commit."""

    def __init__(self, target: Target, rows: Sequence[int], lengths: Sequence[int]):
        self.target = target
        self.trees = {size: some_tree(size, target.vocab_size) for size in rows}
        self.sizes = [(length, size) for length in lengths for size in rows]
        self.samples: dict[tuple[int, int], list[float]] = defaultdict(list)

    def round(self, clock: Clock) -> None:
        """Every size once; where the first round outlasts the time, the larger ones are left out for good."""
        first = clock.rounds == 1
        self._fill()
        if first:
            for size in (self.sizes[0], self.sizes[-1]):
                self._time(*size)  # warm up
        sizes = self.sizes if first else random.Random(clock.rounds).sample(self.sizes, len(self.sizes))
        for size in sizes:
            if first and clock.over and self.samples:
                break
            self.samples[size].append(self._time(*size))
            clock.tick()
        self.sizes = [size for size in self.sizes if size in self.samples]

    def _fill(self) -> None:
        """A cache that reaches as far as the longest context; what its rows hold is all one."""
        decoder = self.target.decoder
        decoder.reset(1)
        decoder.extend([[0, 0]])
        decoder.cache.reserve(max(length for length, _ in self.sizes) + max(size for _, size in self.sizes))

    def _time(self, length: int, size: int) -> float:
        tree, device = self.trees[size], self.target.device
        self.target.decoder.cache.lengths = [length]
        started = now(device)
        logits = self.target.score([tree])[0].logits
        verdict = walk(tree, Sampler(SamplingParams(), length).draws(tree, logits, []))
        self.target.commit([verdict.path])
        return now(device) - started

    @property
    def spread(self) -> float:
        """How far repeats of the same pass lie apart, as a factor."""
        return median(median(taken) / min(taken) for taken in self.samples.values())

    def curves(self, stepped: bool) -> tuple[tuple[int, Curve], ...]:
        """Seconds by rows at each length that was measured in full, rising with both."""
        lengths = sorted({length for length, _ in self.sizes})
        rows = [size for length, size in self.sizes if length == lengths[0]]
        lengths = [length for length in lengths if (length, rows[-1]) in self.samples]
        grid = [monotone([quickest_quarter(self.samples[length, size]) for size in rows]) for length in lengths]
        grid = [list(column) for column in zip(*map(monotone, zip(*grid, strict=True)), strict=True)]
        if len(rows) == 1:  # there was no time for more, which must not make them seem free
            rows, grid = [rows[0], rows[0] + UNSEEN], [[one, 2 * one] for (one,) in grid]
        return tuple(
            (length, Curve(tuple(rows), tuple(seconds), stepped)) for length, seconds in zip(lengths, grid, strict=True)
        )


def some_tree(size: int, vocabulary: int) -> DraftTree:
    """A tree of this many nodes, every node with two children."""
    tree = DraftTree.root(0)
    for node in range(1, size):
        token = torch.tensor([node % vocabulary])
        tree = tree.extend(torch.tensor([(node - 1) // 2]), token, torch.zeros(1), torch.tensor([(node - 1) % 2]))
    return tree


def _draft_passes(engine: Engine, text: list[int], widths: Sequence[int]) -> Iterator[tuple[int, float]]:
    """One cycle's drafting: its first pass and one of each width (or of as many nodes as there are), with seconds."""
    drafter, device = engine.drafter, engine.target.device
    hidden = engine.target.prefill([text], drafter.taps) if drafter.taps else None
    drafter.start([text], hidden, [None])
    root, expanded = Grow(torch.tensor([0]), k=max(widths)), 0
    trees = drafter.expand(drafter.begin([text[-1]]), [root])  # a first cycle, which takes in the text
    bonus = int(trees[0].tokens[min(1, len(trees[0]) - 1)])
    drafter.commit(trees, [torch.tensor([0])], [bonus], hidden and [hidden[0][-1:]])
    trees = drafter.begin([bonus])
    started = now(device)
    trees = drafter.expand(trees, [root])
    yield OPENING, now(device) - started
    for width in widths:
        nodes = torch.arange(expanded + 1, len(trees[0]))[:width]
        if not len(nodes):
            break
        expanded += len(nodes)
        started = now(device)
        trees = drafter.expand(trees, [Grow(nodes, k=CHILDREN)])
        yield len(nodes), now(device) - started


def _overheads(engine: Engine, text: list[int]) -> Iterator[float]:
    """What a plain cycle takes besides its target pass: the loop, the drafter's commit, the text."""
    last = None
    for steps in engine.run([text[-8:]], [SamplingParams(max_new_tokens=CYCLES, eos=())]):
        taken = time.perf_counter()
        if last is not None:
            yield max(taken - last - steps[0].seconds.verify, 0.0)
        last = time.perf_counter()
