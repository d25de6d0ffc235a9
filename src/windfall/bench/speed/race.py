"""Time methods alternately with plain decoding and transformers' own `generate`, on the same prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

from windfall.bench.gpu_internals import MAX_VERIFY_ROWS, VERIFY_ROWS
from windfall.bench.hf_generate import hf_generate
from windfall.bench.runner import Case, Contender, State, answer, check_temperatures, room
from windfall.bench.speed.profiled import inside, unobserved
from windfall.core.clock import now
from windfall.core.errors import InputError
from windfall.core.types import GpuOptions, SamplingParams
from windfall.engine.engine import Generation
from windfall.model.target import Target
from windfall.prompts.samples import SAMPLES

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LOOKUP_TOKENS = 10  # drafted by transformers' prompt lookup
WARM_UP_TOKENS = 32
PARTS = ("draft", "verify", "policy", "other")
HF, ASSISTED = "HF generate", "HF assisted"

Progress = Callable[[int, int], None]  # finished steps, and all steps


@dataclass(frozen=True)
class Settings:
    """What is measured; `couplings` says whether the drafter sees the sampling noise, if there is any."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    couplings: tuple[bool, ...] = (True, False)
    rounds: int = 3
    max_new_tokens: int = 128
    prompt_tokens: int = 200
    lengths: tuple[int, ...] = LENGTHS
    rows: tuple[int, ...] = VERIFY_ROWS
    hf: bool = True
    hf_limit: int | None = 2  # prompts of each task for transformers' own loops, which are slow
    hf_tokens: int = 64  # longest answer of these loops
    ignore_eos: bool = False
    seed: int = 0
    gpu_options: GpuOptions = GpuOptions()

    def __post_init__(self) -> None:
        check_temperatures(self.temperatures)
        if not all(length >= 1 for length in self.lengths):
            raise InputError(f"context lengths are at least 1, not {min(self.lengths)}")
        if not all(1 <= rows <= MAX_VERIFY_ROWS for rows in self.rows):
            raise InputError(f"a verify pass has 1 to {MAX_VERIFY_ROWS} rows")

    @property
    def regimes(self) -> list[Regime]:
        """Every temperature with every coupling; greedy decoding has no noise, and so only one."""
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
        coupling = "coupled" if self.coupled else "uncoupled"
        return f"T={self.temperature:g} {coupling}" if self.temperature else "T=0"


@dataclass(frozen=True)
class Timing:
    """One answer. Decoding is counted after the first cycle, which includes the prefill."""

    task: str
    tokens: tuple[int, ...]
    seconds: float  # of the whole answer
    decoded: int  # tokens after the first cycle
    cycles: int  # after the first
    decoding: float  # seconds after the first cycle
    split: dict[str, float] = field(default_factory=dict)  # the same seconds by part

    @classmethod
    def of(cls, task: str, made: Generation) -> Timing:
        later, stats = made.steps[1:], made.stats
        split = {part: sum(getattr(step.seconds, part) for step in later) for part in PARTS}
        decoded, decoding = sum(len(step.tokens) for step in later), stats.seconds - stats.ttft
        return cls(task, tuple(made.token_ids), stats.seconds, decoded, len(later), decoding, split)


@dataclass
class Entry:
    """A method at one way of sampling, or (without contender) a loop of transformers, and what it did so far."""

    label: str
    regime: Regime
    contender: Contender | None = None
    assistant: Any = None  # for transformers: a model, or the number of tokens to look up; None: plain
    state: State | None = None  # after the warm-up
    rounds: list[list[Timing]] = field(default_factory=list)
    inside: dict[str, Any] | None = None  # what the profiler saw
    fallback: str = ""  # why its texts do not stay on the GPU
    prefills: dict[tuple[str, str], float] = field(default_factory=dict)  # of transformers, by task and id

    @property
    def transformers(self) -> bool:
        return self.contender is None

    def figures(self, task: str | None) -> dict[str, float | None]:
        """Medians over the rounds, of one task or (None) of all."""
        rounds = [[each for each in timings if task in (None, each.task)] for timings in self.rounds]
        whole = [
            sum(len(each.tokens) for each in timings) / max(sum(each.seconds for each in timings), 1e-9)
            for timings in rounds
            if timings
        ]
        ours = [] if self.transformers else rounds  # transformers does not report its cycles
        return {
            "tokens_per_second": _median([_per(timings, "decoded", "decoding") for timings in rounds]),
            "tokens_per_second_with_prefill": _median(whole),
            "tau": _median([_per(timings, "decoded", "cycles") for timings in ours]),
            "cycle_seconds": _median([_per(timings, "decoding", "cycles") for timings in ours]),
        }


def entries(contenders: Sequence[Contender], settings: Settings, assistant: Any) -> list[Entry]:
    """Every method at every way of sampling, but plain decoding and transformers once for each temperature."""
    made, seen = [], set[float]()
    for regime in settings.regimes:
        first = regime.temperature not in seen
        seen.add(regime.temperature)
        made += [Entry(each.method.label, regime, each) for each in contenders if first or not each.method.plain]
    if settings.hf:
        for temperature in settings.temperatures:
            regime = Regime(temperature, settings.couplings[0] if temperature else True)
            made += [Entry(HF, regime), Entry(f"{ASSISTED}, {assisted_by(assistant)}", regime, None, assistant)]
    return made


def assisted_by(assistant: Any) -> str:
    """What transformers drafts with: the drafter's language model or, if it has none, prompt lookup."""
    return f"prompt lookup of {assistant}" if isinstance(assistant, int) else "the drafter's model"


def limited(cases: Sequence[Case], limit: int | None) -> list[Case]:
    """At most `limit` cases of each task."""
    seen: Counter[str] = Counter()
    kept = []
    for case in cases:
        seen[case.prompt.task] += 1
        kept += [case] if limit is None or seen[case.prompt.task] <= limit else []
    return kept


class Race:
    """Runs methods alternately over the same prompts; `rows` has the figures of the rounds that are finished."""

    def __init__(self, target: Target, entries: Sequence[Entry], cases: Sequence[Case], settings: Settings):
        self.target, self.entries, self.cases, self.settings = target, list(entries), list(cases), settings
        self.peaks: dict[str, int] = {}  # bytes of device memory by method

    def run(self, progress: Progress = lambda done, total: None) -> Iterator[None]:
        """Run a warm-up round and the rounds that count, then the profiler; yields whenever `rows` has changed."""
        profiled = [entry for entry in self.entries if entry.contender and self.target.device.type == "cuda"]
        count, rounds = len(self.entries), self.settings.rounds + 1
        total = rounds * count + len(profiled)
        for turn in range(rounds):
            for place in range(count):
                entry = self.entries[(turn + place) % count]
                if turn:
                    entry.rounds.append([self._answer(entry, case) for case in self._cases(entry)])
                    yield
                else:
                    self._warm_up(entry)
                progress(turn * count + place + 1, total)
        whole = [partial(self._generate, entry, self.cases[0], False) for entry in profiled]
        seconds = [unobserved(each) for each in whole]  # all before the profiler, after which launches are slow
        for place, entry in enumerate(profiled):
            first_cycle = partial(self._generate, entry, self.cases[0].cut(1), False)
            entry.inside = inside(whole[place], first_cycle, seconds[place], self.target.device)
            progress(rounds * count + place + 1, total)
        yield

    def _cases(self, entry: Entry) -> list[Case]:
        if not entry.transformers:
            return self.cases
        return [case.cut(self.settings.hf_tokens) for case in limited(self.cases, self.settings.hf_limit)]

    def _warm_up(self, entry: Entry) -> None:
        """Answer prompts that are in no task, keep the learned state as the initial one, and answer every case once."""
        contender = entry.contender
        if contender is None:
            for case in self._cases(entry):
                self._answer(entry, replace(case, params=replace(case.params, max_new_tokens=2)))
            return
        contender.reset(State(contender.method.make()))
        contender.engine.coupled = entry.regime.coupled
        tokens = min(WARM_UP_TOKENS, self.settings.max_new_tokens)
        params = SamplingParams(max_new_tokens=tokens, temperature=entry.regime.temperature, seed=self.settings.seed)
        for text in SAMPLES[:2] if self.target.tokenizer is not None else ():
            answer(contender.engine, [contender.engine.tokenize(text)[-room(self.target, tokens) :]], [params])
        entry.state = State(contender.engine.policy, dict(contender.engine.calibrators))
        for case in self._cases(entry):
            self._answer(entry, case)

    def _answer(self, entry: Entry, case: Case) -> Timing:
        if entry.contender is None:
            return self._transformers(entry, case)
        return Timing.of(case.prompt.task, self._generate(entry, case))

    def _generate(self, entry: Entry, case: Case, timed: bool = True) -> Generation:
        """The answer; without `timed`, nothing is learned from the clock, and the trees are the same at any speed."""
        contender = entry.contender
        assert contender is not None and entry.state is not None
        contender.reset(entry.state)
        for calibrator in contender.engine.calibrators.values():
            calibrator.timed = timed
        contender.engine.coupled = entry.regime.coupled
        made = answer(contender.engine, [case.ids], [case.at(entry.regime.temperature)])[0]
        entry.fallback = contender.engine.fallback
        return made

    def _transformers(self, entry: Entry, case: Case) -> Timing:
        """An answer of transformers' own loop; the time for a single token counts as its first cycle."""
        key, params = (case.prompt.task, case.prompt.id), case.at(entry.regime.temperature)
        if key not in entry.prefills:
            once = replace(params, max_new_tokens=1)
            timed_generate(self.target, case.ids, once, None)
            entry.prefills[key] = timed_generate(self.target, case.ids, once, None)[1]
        tokens, seconds = timed_generate(self.target, case.ids, params, entry.assistant)
        decoding = max(seconds - entry.prefills[key], 0.0)
        return Timing(case.prompt.task, tokens, seconds, len(tokens) - 1, len(tokens) - 1, decoding)

    # ---- results

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The figures of every entry that has finished a round."""
        return [self._row(entry) for entry in self.entries if entry.rounds]

    def _row(self, entry: Entry) -> dict[str, Any]:
        same, texts = self._same_texts(entry)
        peak, plain = self.peaks.get(entry.label), self.peaks.get("none")
        tasks = dict.fromkeys(case.prompt.task for case in self._cases(entry))
        return {
            "method": entry.label,
            "temperature": entry.regime.temperature,
            "coupled": entry.regime.coupled if entry.regime.temperature else None,
            **self._figures(entry, None),
            "same_texts": same,
            "texts": texts,
            "split": None if entry.transformers else split_of([each for made in entry.rounds for each in made]),
            "peak_bytes": peak,
            "memory_overhead": peak / plain - 1 if peak and plain else None,
            "inside": entry.inside,
            "fallback": entry.fallback or None,
            "tasks": {task: self._figures(entry, task) for task in tasks},
        }

    def _figures(self, entry: Entry, task: str | None) -> dict[str, Any]:
        """Figures of an entry, and its speed over that of plain decoding and of `generate`."""
        figures = entry.figures(task)
        speed, ratios = figures["tokens_per_second"], {}
        for name, label in (("over_none", "none"), ("over_hf", HF)):
            other = self._reference(label, entry)
            base = None if other is None else other.figures(task)["tokens_per_second"]
            ratios[name] = speed / base if speed and base else None
        return {**figures, **ratios, "rounds": len(entry.rounds)}

    def _reference(self, label: str, entry: Entry) -> Entry | None:
        """The entry of another method at the same temperature; its coupling does not matter."""
        temperature = entry.regime.temperature
        return next(
            (e for e in self.entries if e.label == label and e.regime.temperature == temperature and e.rounds), None
        )

    def _same_texts(self, entry: Entry) -> tuple[int | None, int | None]:
        """The number of texts equal to plain decoding's, and of all; None where transformers draws with other noise."""
        plain = self._reference("none", entry)
        if plain is None or (entry.transformers and entry.regime.temperature):
            return None, None
        pairs = zip(self.cases, plain.rounds[0], strict=True)
        wanted = {(case.prompt.task, case.prompt.id): made.tokens for case, made in pairs}
        found = []
        for timings in entry.rounds:
            for case, made in zip(self._cases(entry), timings, strict=True):
                text = wanted[case.prompt.task, case.prompt.id]
                found.append(made.tokens == (text[: len(made.tokens)] if entry.transformers else text))
        return sum(found), len(found)


def split_of(made: Sequence[Timing]) -> dict[str, Any]:
    """Milliseconds of a cycle by part; `host` is the time that the cycles' own clocks did not see.

    `rest_share` is the share of everything but drafting and verifying."""
    cycles, wall = max(sum(each.cycles for each in made), 1), sum(each.decoding for each in made)
    parts = {part: sum(each.split.get(part, 0.0) for each in made) for part in PARTS}
    parts["host"] = max(wall - sum(parts.values()), 0.0)
    found: dict[str, Any] = {f"{part}_ms": 1000 * seconds / cycles for part, seconds in parts.items()}
    found["rest_share"] = max(1 - (parts["draft"] + parts["verify"]) / wall, 0.0) if wall else None
    return found


def _per(timings: Sequence[Timing], above: str, below: str) -> float | None:
    total = sum(getattr(each, below) for each in timings)
    return sum(getattr(each, above) for each in timings) / total if total else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def timed_generate(
    target: Target, ids: list[int], params: SamplingParams, assistant: Any
) -> tuple[tuple[int, ...], float]:
    """The tokens that `generate` adds to a prompt, and the seconds it takes."""
    started = now(target.device)
    [tokens] = hf_generate(target, [ids], params, assistant)
    return tuple(tokens), now(target.device) - started
