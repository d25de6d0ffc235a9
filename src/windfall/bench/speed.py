"""How fast, and where the time goes: passes by rows and by context against the memory's limit, launches, and methods
against plain decoding and transformers' own `generate`, all in one process and in turns."""

from __future__ import annotations

import gc
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from windfall.bench.methods import DrafterSpec, Method
from windfall.bench.runner import Contender, State, answer, assemble, question, room, seed_of
from windfall.bench.tasks import Prompt
from windfall.drafters.base import Drafter
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine import Generation
from windfall.errors import InputError
from windfall.plotting import COLOURS
from windfall.policies.auto import Auto
from windfall.profiling import now, some_tree
from windfall.prompts import SAMPLES
from windfall.records import Launch, SamplingParams
from windfall.resident.cycle import Cycle
from windfall.resident.drafting import Sprouting
from windfall.resident.judge import MOST, ROWS, Judge
from windfall.resident.loop import Resident
from windfall.resident.plans import AutoPlan
from windfall.resident.rope import steady
from windfall.target import Target

METHODS = ("none", "beam:depth=7:k=10:nodes=60", "auto", "ddd", "gt", "talon", "opt-tree", "chain:depth=7")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CONTEXT = 512  # behind which passes are timed by rows
FEW, MANY = 1, 64  # rows of the passes timed by context length
LOOKUP = 10  # tokens that transformers' prompt lookup drafts
DEPTH = 12  # draft passes before a verify pass is timed, so that there is a tree to choose from
PASSES = 9  # rounds over all passes
COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes of the copy that measures the memory
AHEAD = 2_000_000  # cycles for which the GPU waits while the host queues the work that is timed
WARM_UP = 32  # tokens
SHOWN = 30  # kernels that are listed
PRODUCTS = ("gemm", "gemv", "cutlass", "nvjet", "cublas", "splitk", "flash", "fmha", "attention", "triton_")
FUSED = ("_attend", "_combine", "_add_norm", "_silu_mul", "_rotate_and_store", "_pair_norm")
MODEL = PRODUCTS + FUSED  # in the names of kernels that compute a model
HF, ASSISTED = "HF generate", "HF assisted"

Progress = Callable[[int, int], None]  # how many of how many are done


@dataclass(frozen=True)
class Settings:
    """What is measured; `couplings` says whether the drafter sees the noise, where there is any."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    couplings: tuple[bool, ...] = (True, False)
    rounds: int = 3
    max_new_tokens: int = 128
    prompt_tokens: int = 200
    lengths: tuple[int, ...] = LENGTHS
    rows: tuple[int, ...] = ROWS
    hf: bool = True
    hf_limit: int | None = 2  # prompts of each task for transformers' own loops, which are slow
    ignore_eos: bool = False
    seed: int = 0
    launch: Launch = Launch()

    def __post_init__(self) -> None:
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise InputError("give each temperature once, for example 0,1")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
        if not all(length >= 1 for length in self.lengths):
            raise InputError(f"context lengths are at least 1, not {min(self.lengths)}")
        if not all(1 <= rows <= MOST for rows in self.rows):
            raise InputError(f"a verify pass has 1 to {MOST} rows")

    @property
    def regimes(self) -> list[Regime]:
        """Greedy decoding has no noise to see."""
        return [
            Regime(temperature, coupled)
            for temperature in self.temperatures
            for coupled in (self.couplings if temperature else (True,))
        ]


@dataclass(frozen=True)
class Regime:
    """A way of sampling."""

    temperature: float
    coupled: bool

    @property
    def label(self) -> str:
        return f"T={self.temperature:g}" + (
            "" if not self.temperature else " coupled" if self.coupled else " uncoupled"
        )


@dataclass
class Result:
    """All that was measured so far, as plain data."""

    target: str
    provenance: dict[str, Any]
    settings: dict[str, Any]
    memory: dict[str, Any] = field(default_factory=dict)  # bandwidth and sizes
    passes: dict[str, Any] = field(default_factory=dict)
    methods: list[dict[str, Any]] = field(default_factory=list)
    profiles: dict[str, Any] = field(default_factory=dict)  # costs that policies went by
    finished: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {"what": "speed of passes and methods", **asdict(self)}


# ---- time and memory


def timed(device: torch.device, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Seconds that the device takes for this work. On a GPU the host has queued all of it before it begins."""
    before()
    if device.type != "cuda":
        started = now(device)
        work()
        return now(device) - started
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


def row_size(judge: Judge) -> int:
    """Bytes of a token's keys and values in all layers."""
    layers, heads, width = judge.forward.shape
    return int(2 * layers * heads * width * judge.dtype.itemsize)


def module_of(drafter: Drafter) -> torch.nn.Module | None:
    """The network of a drafter that runs on the device."""
    if isinstance(drafter, FeatureHeadDrafter):
        return drafter.head
    return drafter.decoder.model if isinstance(drafter, LMDrafter) else None


# ---- passes


@dataclass(frozen=True)
class Bench:
    """Passes on fixed buffers, to be timed."""

    judge: Judge
    cycle: Cycle | None  # where the drafter works on the device

    @classmethod
    def of(cls, resident: Resident, longest: int) -> Bench:
        resident.judge.reserve(longest + 2 * MOST)
        cycle = None if resident.drafts_on_host else Cycle(AutoPlan(Auto()), resident.drafter, resident.judge)
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
        key = ("speed", "verify", rows, columns, cycle.judge.capacity)
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

        cycle.judge.recorder.run(("speed", "draft", passes, cycle.judge.capacity), work)


@torch.inference_mode()
def measure_passes(
    resident: Resident, settings: Settings, speed: float, progress: Progress = lambda done, total: None
) -> dict[str, Any]:
    """Times, floors and launches of verify passes by rows and by context length, and of draft passes."""
    lengths, beyond = usable_lengths(resident.target, settings.lengths)
    base = CONTEXT if usable_lengths(resident.target, (CONTEXT,))[0] else min(lengths, default=1)
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
    return _passes_told(resident, settings, taken, works, speed, base, lengths, beyond)


def usable_lengths(target: Target, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """The context lengths that passes can be timed behind, and those of them that the model was not made for."""
    context = target.context
    inside = [n for n in lengths if context is None or n + MOST <= context]
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
    resident: Resident,
    settings: Settings,
    taken: dict[Any, float],
    works: dict[Any, Any],
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
    told["launches"] = {
        f"verify pass, {FEW} row": _launched(judge.device, works, "forward", base, FEW),
        f"verify pass, {MANY} rows": _launched(judge.device, works, "forward", base, MANY),
        f"all of a cycle's verifying, {MANY} rows": _launched(judge.device, works, "verify", base, MANY),
        "first draft pass": _launched(judge.device, works, "draft", base, 1),
    }
    if (four := taken.get(("draft", base, 4))) is not None:
        first, floor = taken["draft", base, 1], size_of(drafting) / speed
        told["draft"] = {"first_seconds": first, "later_seconds": (four - first) / 3, "floor_seconds": floor}
        all_four, one = (_launched(judge.device, works, "draft", base, passes) for passes in (4, 1))
        told["launches"]["later draft pass"] = None if all_four is None or one is None else (all_four - one) / 3
    return told


def _same_series(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether one is a point of the curve that the other belongs to: all of a table by rows, or one number of rows."""
    return "beyond_context" not in one or one["rows"] == other["rows"]


def _launched(device: torch.device, works: dict[Any, Any], *key: Any) -> int | None:
    """Kernels that this work launches; None where the device does not tell."""
    if key not in works or device.type != "cuda":
        return None
    before, work = works[key]
    before()
    return sum(seen.count for seen in kernels(work) if not seen.copies)


# ---- the profiler


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


# ---- methods


@dataclass(frozen=True)
class Case:
    """A prompt as token ids."""

    prompt: Prompt
    ids: list[int]
    params: SamplingParams

    def at(self, temperature: float) -> SamplingParams:
        return replace(self.params, temperature=temperature)


@dataclass(frozen=True)
class Timing:
    """One answer. Decoding begins when the first cycle has ended, which the prefill belongs to."""

    task: str
    tokens: tuple[int, ...]
    seconds: float  # of the whole answer
    decoded: int  # tokens behind the first cycle's
    cycles: int  # likewise
    decoding: float  # seconds, likewise
    split: dict[str, float] = field(default_factory=dict)  # of the decoding

    @classmethod
    def of(cls, task: str, made: Generation) -> Timing:
        later, stats = made.steps[1:], made.stats
        split = {
            part: sum(getattr(step.seconds, part) for step in later) for part in ("draft", "verify", "policy", "other")
        }
        decoded, decoding = sum(len(step.tokens) for step in later), stats.seconds - stats.ttft
        return cls(task, tuple(made.token_ids), stats.seconds, decoded, len(later), decoding, split)


@dataclass(frozen=True)
class Entry:
    """A method at one way of sampling, or (without contender) a loop of transformers."""

    label: str
    regime: Regime
    contender: Contender | None = None
    assistant: Any = None  # for transformers: a model, or how many tokens to look up; None: plain

    @property
    def transformers(self) -> bool:
        return self.contender is None


def entries(contenders: Sequence[Contender], settings: Settings, assistant: Any) -> list[Entry]:
    """Every method at every way of sampling, plain decoding only once at each temperature."""
    made, seen = [], set()
    for regime in settings.regimes:
        for each in contenders:
            key = (each.method.label, regime.temperature, regime.coupled and not each.method.plain)
            if each.method.plain and key in seen:
                continue
            seen.add(key)
            made.append(Entry(each.method.label, regime, each))
    if settings.hf:
        for temperature in settings.temperatures:
            regime = Regime(temperature, settings.couplings[0] if temperature else True)
            made += [Entry(HF, regime), Entry(f"{ASSISTED}, {assisted_by(assistant)}", regime, None, assistant)]
    return made


def assisted_by(assistant: Any) -> str:
    """What transformers drafts with: a language model, or (where the drafter is none) the text itself."""
    return f"prompt lookup of {assistant}" if isinstance(assistant, int) else "the drafter's model"


def cases_of(prompts: Sequence[Prompt], contender: Contender, settings: Settings) -> list[Case]:
    """The first questions of the prompts that the target has room for."""
    engine, found = contender.engine, []
    most = room(engine.target, settings.max_new_tokens)
    eos = () if settings.ignore_eos else None
    for prompt in prompts:
        ids = question(prompt, (), engine, settings.prompt_tokens)
        seed = seed_of(settings.seed, 0, prompt)
        params = engine.params(max_new_tokens=settings.max_new_tokens, seed=seed, eos=eos)
        found += [Case(prompt, ids, params)] if len(ids) <= most else []
    if not found:
        raise InputError(
            f"no prompt fits the context of {engine.target.name} with {settings.max_new_tokens} new tokens"
        )
    return found


def few(cases: Sequence[Case], limit: int | None) -> list[Case]:
    """`limit` cases of each task."""
    seen: Counter[str] = Counter()
    kept = []
    for case in cases:
        seen[case.prompt.task] += 1
        kept += [case] if limit is None or seen[case.prompt.task] <= limit else []
    return kept


class Contest:
    """Methods in turns over the same prompts; what is finished is folded into rows after every turn."""

    def __init__(self, target: Target, entries: Sequence[Entry], cases: Sequence[Case], settings: Settings):
        self.target, self.entries, self.cases, self.settings = target, list(entries), list(cases), settings
        self.rounds: dict[tuple[str, Regime], list[list[Timing]]] = defaultdict(list)
        self.seen: dict[tuple[str, Regime], dict[str, Any]] = {}  # by the profiler
        self.peaks: dict[str, int] = {}  # bytes
        self._states: dict[tuple[str, Regime], State] = {}
        self._prefills: dict[tuple[str, Regime, str, str], float] = {}

    def run(self, progress: Progress = lambda done, total: None) -> Iterator[None]:
        """A round that nothing is kept of, so that all is recorded and learnt, then those that count."""
        count, total = len(self.entries), (self.settings.rounds + 1) * len(self.entries)
        for turn in range(self.settings.rounds + 1):
            for place in range(count):
                entry = self.entries[(turn + place) % count]
                made = self._warm_up(entry) if not turn else [self._answer(entry, case) for case in self._own(entry)]
                if turn:
                    self.rounds[entry.label, entry.regime].append(made)
                    yield
                progress(turn * count + place + 1, total)
        for entry in self.entries:
            self._look_inside(entry)
        yield

    def _own(self, entry: Entry) -> list[Case]:
        return few(self.cases, self.settings.hf_limit) if entry.transformers else self.cases

    def _warm_up(self, entry: Entry) -> list[Timing]:
        """Learn from prompts that are in no task, keep that as the state to begin with, and see all cases once."""
        contender = entry.contender
        if contender is None:
            brief = [replace(case, params=replace(case.params, max_new_tokens=2)) for case in self._own(entry)]
            return [self._answer(entry, case) for case in brief]
        contender.reset(State(contender.method.make()))
        contender.engine.coupled = entry.regime.coupled
        for text in SAMPLES[:2] if self.target.tokenizer is not None else ():
            tokens = min(WARM_UP, self.settings.max_new_tokens)
            ids = contender.engine.tokenize(text)[-room(self.target, tokens) :]
            params = SamplingParams(max_new_tokens=tokens, temperature=entry.regime.temperature)
            answer(contender.engine, [ids], [params])
        state = State(contender.engine.policy, dict(contender.engine.calibrators))
        self._states[entry.label, entry.regime] = state
        return [self._answer(entry, case) for case in self._own(entry)]

    def _answer(self, entry: Entry, case: Case) -> Timing:
        if entry.contender is None:
            return self._transformers(entry, case)
        return Timing.of(case.prompt.task, self._generate(entry, case))

    def _generate(self, entry: Entry, case: Case) -> Generation:
        contender = entry.contender
        assert contender is not None
        contender.reset(self._states[entry.label, entry.regime])
        contender.engine.coupled = entry.regime.coupled
        return answer(contender.engine, [case.ids], [case.at(entry.regime.temperature)])[0]

    def _transformers(self, entry: Entry, case: Case) -> Timing:
        """transformers' own loop; what it takes for a single token counts as its first cycle."""
        key, params = (entry.label, entry.regime, case.prompt.task, case.prompt.id), case.at(entry.regime.temperature)
        if key not in self._prefills:
            once = replace(params, max_new_tokens=1)
            transformers_answer(self.target, case.ids, once, None)
            self._prefills[key] = transformers_answer(self.target, case.ids, once, None)[1]
        tokens, seconds = transformers_answer(self.target, case.ids, params, entry.assistant)
        decoding = max(seconds - self._prefills[key], 0.0)
        return Timing(case.prompt.task, tokens, seconds, len(tokens) - 1, len(tokens) - 1, decoding)

    def _look_inside(self, entry: Entry) -> None:
        """One answer under the profiler."""
        if entry.contender is None or self.target.device.type != "cuda" or (entry.label, entry.regime) in self.seen:
            return
        cycle = _median([_per(made, "decoding", "cycles") for made in self.rounds[entry.label, entry.regime]])
        case = self.cases[0]
        self.seen[entry.label, entry.regime] = inside(lambda: self._generate(entry, case), cycle or 0.0)

    # ---- what came of it

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every entry that has finished a round."""
        done = [entry for entry in self.entries if self.rounds[entry.label, entry.regime]]
        return [self._row(entry) for entry in done]

    def _row(self, entry: Entry) -> dict[str, Any]:
        made = self.rounds[entry.label, entry.regime]
        told: dict[str, Any] = {
            "method": entry.label,
            "temperature": entry.regime.temperature,
            "coupled": entry.regime.coupled if entry.regime.temperature else None,
            **self._figures(entry, None),
        }
        told["same_texts"], told["texts"] = self._same(entry)
        told["split"] = None if entry.transformers else split_of([each for turn in made for each in turn])
        peak, plain = self.peaks.get(entry.label), self.peaks.get("none")
        told["peak_bytes"] = peak
        told["memory_overhead"] = peak / plain - 1 if peak and plain else None
        told["inside"] = self.seen.get((entry.label, entry.regime))
        told["fallback"] = None if entry.contender is None else entry.contender.engine.fallback or None
        told["tasks"] = {
            task: self._figures(entry, task) for task in dict.fromkeys(case.prompt.task for case in self._own(entry))
        }
        return told

    def _figures(self, entry: Entry, task: str | None) -> dict[str, Any]:
        """Medians over the rounds; ratios are against the same rounds of plain decoding and of `generate`."""
        speed = self._speed(entry.label, entry.regime, task)
        plain, slow = self._reference("none", entry, task), self._reference(HF, entry, task)
        whole = self._speed(entry.label, entry.regime, task, whole=True)
        made = [_of_task(turn, task) for turn in self.rounds[entry.label, entry.regime]]
        return {
            "tokens_per_second": speed,
            "tokens_per_second_with_prefill": whole,
            "tau": None if entry.transformers else _median([_per(turn, "decoded", "cycles") for turn in made]),
            "cycle_seconds": None
            if entry.transformers
            else _median([_per(turn, "decoding", "cycles") for turn in made]),
            "over_none": speed / plain if speed and plain else None,
            "over_hf": speed / slow if speed and slow else None,
            "rounds": len(made),
        }

    def _speed(self, label: str, regime: Regime, task: str | None, whole: bool = False) -> float | None:
        turns = [_of_task(turn, task) for turn in self.rounds.get((label, regime), [])]
        if whole:
            return _median(
                [
                    sum(len(each.tokens) for each in turn) / max(sum(each.seconds for each in turn), 1e-9)
                    for turn in turns
                    if turn
                ]
            )
        return _median([_per(turn, "decoded", "decoding") for turn in turns])

    def _reference(self, label: str, entry: Entry, task: str | None) -> float | None:
        """The speed of this method at the same temperature; what the drafter sees is nothing to it."""
        same = (
            regime for name, regime in self.rounds if name == label and regime.temperature == entry.regime.temperature
        )
        regime = next(same, None)
        return None if regime is None else self._speed(label, regime, task)

    def _same(self, entry: Entry) -> tuple[int | None, int | None]:
        """Texts that are plain decoding's, and all; transformers draws by itself, so there only greedy ones count."""
        temperature = entry.regime.temperature
        plain = next(
            (
                made
                for (name, regime), made in self.rounds.items()
                if name == "none" and regime.temperature == temperature and made
            ),
            None,
        )
        if plain is None or (entry.transformers and temperature):
            return None, None
        wanted = {
            (case.prompt.task, case.prompt.id): made.tokens for case, made in zip(self.cases, plain[0], strict=True)
        }
        own = self._own(entry)
        pairs = [
            (wanted[case.prompt.task, case.prompt.id], made.tokens)
            for turn in self.rounds[entry.label, entry.regime]
            for case, made in zip(own, turn, strict=True)
        ]
        return sum(one == other for one, other in pairs), len(pairs)


def split_of(made: Sequence[Timing]) -> dict[str, Any]:
    """Milliseconds of a cycle by part; `host` is what the cycles' own clocks did not see. `rest_share` is all that is
    neither drafting nor verifying."""
    cycles, wall = max(sum(each.cycles for each in made), 1), sum(each.decoding for each in made)
    parts = {part: sum(each.split.get(part, 0.0) for each in made) for part in ("draft", "verify", "policy", "other")}
    parts["host"] = max(wall - sum(parts.values()), 0.0)
    told: dict[str, Any] = {f"{part}_ms": 1000 * seconds / cycles for part, seconds in parts.items()}
    told["rest_share"] = max(1 - (parts["draft"] + parts["verify"]) / wall, 0.0) if wall else None
    return told


def _of_task(turn: Sequence[Timing], task: str | None) -> list[Timing]:
    return [each for each in turn if task in (None, each.task)]


def _per(turn: Sequence[Timing], above: str, below: str) -> float | None:
    total = sum(getattr(each, below) for each in turn)
    return sum(getattr(each, above) for each in turn) / total if total else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


@torch.inference_mode()
def transformers_answer(
    target: Target, ids: list[int], params: SamplingParams, assistant: Any
) -> tuple[tuple[int, ...], float]:
    """The tokens that `generate` adds, and the seconds it takes; with an assistant, or with prompt lookup."""
    from transformers import GenerationConfig

    model, eos = target.model, target.eos if params.eos is None else params.eos
    drawn = {"do_sample": True, "temperature": params.temperature, "top_k": 0, "top_p": 1.0}
    more: dict[str, Any] = {"prompt_lookup_num_tokens": assistant} if isinstance(assistant, int) else {}
    config = GenerationConfig(
        max_new_tokens=params.max_new_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=eos[0] if eos else 0,
        **({"do_sample": False} if params.greedy else drawn),
        **more,
    )
    given = torch.tensor([ids], device=target.device)
    helper = None if assistant is None or isinstance(assistant, int) else assistant
    own, model.generation_config = model.generation_config, config
    try:
        torch.manual_seed(params.seed)
        started = now(target.device)
        made: Tensor = model.generate(input_ids=given, attention_mask=torch.ones_like(given), assistant_model=helper)
        return tuple(made[0, len(ids) :].tolist()), now(target.device) - started
    finally:
        model.generation_config = own


# ---- memory


def peak_of(target: Target, method: Method, drafter: DrafterSpec, case: Case, settings: Settings) -> int | None:
    """The most bytes that this method alone needs for one answer, weights included; None but on a CUDA device."""
    if target.device.type != "cuda":
        return None
    loaded = size_of(drafter.model) if isinstance(drafter, Ready) and not method.plain and not method.drafter else 0
    _clear()
    before = torch.cuda.memory_allocated(target.device)
    torch.cuda.reset_peak_memory_stats(target.device)
    (contender,) = assemble([method], target, drafter, settings.couplings[0], launch=settings.launch)
    contender.engine.policy = method.make()
    answer(contender.engine, [case.ids], [case.params])
    peak = torch.cuda.max_memory_allocated(target.device)
    del contender
    _clear()
    return int(peak - before) + size_of(target.model) + loaded


def transformers_peak(target: Target, case: Case, assistant: Any) -> int | None:
    """The same for transformers' own loops; an assistant's weights are counted too."""
    if target.device.type != "cuda":
        return None
    _clear()
    before = torch.cuda.memory_allocated(target.device)
    torch.cuda.reset_peak_memory_stats(target.device)
    transformers_answer(target, case.ids, case.params, assistant)
    helper = assistant if isinstance(assistant, torch.nn.Module) else None
    return int(torch.cuda.max_memory_allocated(target.device) - before) + size_of(target.model) + size_of(helper)


def _clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


# ---- widened pairs


@dataclass(frozen=True)
class Ready(DrafterSpec):
    """A drafter that was made already."""

    model: Any = None

    def make(self, trust_remote_code: bool = False) -> Drafter:
        from windfall.loading import as_drafter

        return as_drafter(self.model)


def widened(target: Target, drafter: DrafterSpec, like: str) -> tuple[Target, DrafterSpec]:
    """The pair at a larger one's cost; a drafter that is no head stays as it is."""
    from windfall.testing import widen, widen_pair

    made, name = drafter.make(), target.name.rstrip("/").rpartition("/")[2]
    if not isinstance(made, FeatureHeadDrafter):
        return Target(widen(target.model, like, name), target.tokenizer), drafter
    made.attach(target)
    pair = widen_pair(target.model, made.head, like, name)
    return Target(pair.model, target.tokenizer), Ready(drafter.label, {}, pair.head)


# ---- all of it


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
    """Measure everything into the result, which is handed to `keep` whenever something more is finished.

    `attach` gives the contenders their costs, and returns them."""
    contenders = assemble(methods, target, drafter, settings.couplings[0], trust_remote_code, settings.launch)
    drafting = next((each.engine for each in contenders if not each.method.plain), contenders[0].engine)
    assistant = drafting.drafter.decoder.model if isinstance(drafting.drafter, LMDrafter) else LOOKUP
    cases = cases_of(prompts, contenders[0], settings)
    contest = Contest(target, entries(contenders, settings, assistant), cases, settings)

    speed = bandwidth(target.device)
    resident, reason = Resident.of(drafting.target, drafting.drafter, settings.launch)
    drafts = module_of(drafting.drafter)
    result.memory = {
        "bandwidth": speed,
        "target_bytes": size_of(target.model),
        "target_bytes_read": weights_read(target.model),
        "drafter_bytes": size_of(drafts),
        "row_bytes": None if resident is None else row_size(resident.judge),
    }
    if resident is None:
        result.passes = {"skipped": reason}
    else:
        result.passes = measure_passes(resident, settings, speed, lambda *done: progress("Passes", *done))
    del resident
    keep(result)

    longest = max(cases, key=lambda case: len(case.ids))
    for place, method in enumerate(methods if target.device.type == "cuda" else ()):
        if not place:  # the first engine of all merges weights, which takes memory for a moment
            peak_of(target, method, drafter, longest, settings)
        contest.peaks[method.label] = peak_of(target, method, drafter, longest, settings) or 0
        progress("Memory", place + 1, len(methods))
    if target.device.type == "cuda" and settings.hf:
        for entry in (each for each in contest.entries if each.transformers):
            contest.peaks[entry.label] = transformers_peak(target, longest, entry.assistant) or 0
    result.profiles = attach(contenders)
    for _ in contest.run(lambda *done: progress("Methods", *done)):
        result.methods = contest.rows
        keep(result)
    result.finished = True
    keep(result)


# ---- plot


def plot(told: dict[str, Any], file: Path) -> None:
    """Speed-ups by method and way of sampling, passes by rows and by context length, both with their floors."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's settings
    gains, rows, lengths = figure.subplots(1, 3, width_ratios=(1.6, 1, 1))
    _plot_gains(gains, told["methods"])
    _plot_passes(rows, told["passes"].get("rows", []), "rows", "Verify pass by rows")
    _plot_passes(lengths, told["passes"].get("lengths", []), "length", "Verify pass by context")
    for axes in (gains, rows, lengths):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    machine = told["provenance"]["machine"]
    where = f"{machine['gpu'] or machine['cpu']}, {told['provenance']['target']['dtype']}"
    figure.suptitle(f"{told['target']} on {where}", fontsize=10)
    figure.savefig(file, dpi=150, format=file.suffix[1:] if file.suffix else "png")


def _plot_gains(axes: Any, methods: list[dict[str, Any]]) -> None:
    shown = [row for row in methods if row["over_none"] is not None]
    labels = list(dict.fromkeys(row["method"] for row in shown))
    regimes = list(dict.fromkeys((row["temperature"], row["coupled"]) for row in shown))
    for place, regime in enumerate(regimes):
        own = {row["method"]: row["over_none"] for row in shown if (row["temperature"], row["coupled"]) == regime}
        at = [labels.index(name) + (place - (len(regimes) - 1) / 2) * 0.8 / len(regimes) for name in own]
        name = Regime(regime[0], bool(regime[1])).label
        axes.barh(at, list(own.values()), 0.8 / len(regimes), label=name, color=COLOURS[place % len(COLOURS)])
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="#999999", linewidth=1)
    axes.set(title="Speed against plain decoding", xlabel="tokens/s over none's")
    if shown:
        axes.legend(frameon=False, fontsize=7)


def _plot_passes(axes: Any, table: list[dict[str, Any]], by: str, title: str) -> None:
    series: list[int | None] = [None] if by == "rows" else list(dict.fromkeys(row["rows"] for row in table))
    for place, rows in enumerate(series):
        own = [row for row in table if rows in (None, row["rows"])]
        at, name = [row[by] for row in own], "forward" if rows is None else f"{rows} rows"
        axes.plot(at, [1000 * row["seconds"] for row in own], "o-", color=COLOURS[place], label=name)
    if table:
        floor = {row[by]: 1000 * row["floor_seconds"] for row in table}
        axes.plot(list(floor), list(floor.values()), "--", color="#999999", label="bytes over bandwidth")
        axes.legend(frameon=False, fontsize=7)
    axes.set(title=title, xlabel="rows" if by == "rows" else "tokens of context", ylabel="milliseconds")
    axes.set_ylim(bottom=0)
