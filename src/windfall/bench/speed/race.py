"""Methods in turns against plain decoding and transformers' own `generate`, on the same prompts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from windfall.bench.runner import Contender, State, answer, question, room, seed_of
from windfall.bench.speed.profiled import inside, unobserved
from windfall.bench.tasks import Prompt
from windfall.core.clock import now
from windfall.core.errors import InputError
from windfall.core.types import GpuOptions, SamplingParams
from windfall.engine.engine import Generation
from windfall.engine.gpu.target import MAX_VERIFY_ROWS, ROWS
from windfall.model.target import Target
from windfall.prompts.samples import SAMPLES

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LOOKUP = 10  # tokens that transformers' prompt lookup drafts
WARM_UP = 32  # tokens
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
    hf_tokens: int = 64  # of their answers, at the most
    ignore_eos: bool = False
    seed: int = 0
    launch: GpuOptions = GpuOptions()

    def __post_init__(self) -> None:
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise InputError("give each temperature once, for example 0,1")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)
        if not all(length >= 1 for length in self.lengths):
            raise InputError(f"context lengths are at least 1, not {min(self.lengths)}")
        if not all(1 <= rows <= MAX_VERIFY_ROWS for rows in self.rows):
            raise InputError(f"a verify pass has 1 to {MAX_VERIFY_ROWS} rows")

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


@dataclass(frozen=True)
class Case:
    """A prompt as token ids."""

    prompt: Prompt
    ids: list[int]
    params: SamplingParams

    def cut(self, tokens: int) -> Case:
        """The same with an answer of so many tokens at the most."""
        return replace(self, params=replace(self.params, max_new_tokens=min(tokens, self.params.max_new_tokens)))

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


class Race:
    """Methods in turns over the same prompts; what is finished is folded into rows after every turn."""

    def __init__(self, target: Target, entries: Sequence[Entry], cases: Sequence[Case], settings: Settings):
        self.target, self.entries, self.cases, self.settings = target, list(entries), list(cases), settings
        self.rounds: dict[tuple[str, Regime], list[list[Timing]]] = defaultdict(list)
        self.seen: dict[tuple[str, Regime], dict[str, Any]] = {}  # by the profiler
        self.peaks: dict[str, int] = {}  # bytes
        self._states: dict[tuple[str, Regime], State] = {}
        self._fallbacks: dict[tuple[str, Regime], str] = {}  # why texts do not stay on the device
        self._prefills: dict[tuple[str, Regime, str, str], float] = {}

    def run(self, progress: Progress = lambda done, total: None) -> Iterator[None]:
        """A round that nothing is kept of, so that all is recorded and learnt, then those that count; in the end the
        profiler looks inside."""
        looked_at = [entry for entry in self.entries if entry.contender and self.target.device.type == "cuda"]
        count, rounds = len(self.entries), self.settings.rounds + 1
        total = rounds * count + len(looked_at)
        for turn in range(rounds):
            for place in range(count):
                entry = self.entries[(turn + place) % count]
                made = self._warm_up(entry) if not turn else [self._answer(entry, case) for case in self._own(entry)]
                if turn:
                    self.rounds[entry.label, entry.regime].append(made)
                    yield
                progress(turn * count + place + 1, total)
        seconds = [unobserved(partial(self._whole, entry)) for entry in looked_at]  # of all, before it looks at any
        for place, entry in enumerate(looked_at):
            whole, beginning = partial(self._whole, entry), partial(self._beginning, entry)
            self.seen[entry.label, entry.regime] = inside(whole, beginning, seconds[place], self.target.device)
            progress(rounds * count + place + 1, total)
        yield

    def _own(self, entry: Entry) -> list[Case]:
        if not entry.transformers:
            return self.cases
        return [case.cut(self.settings.hf_tokens) for case in few(self.cases, self.settings.hf_limit)]

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
            params = SamplingParams(
                max_new_tokens=tokens, temperature=entry.regime.temperature, seed=self.settings.seed
            )
            answer(contender.engine, [ids], [params])
        state = State(contender.engine.policy, dict(contender.engine.calibrators))
        self._states[entry.label, entry.regime] = state
        return [self._answer(entry, case) for case in self._own(entry)]

    def _answer(self, entry: Entry, case: Case) -> Timing:
        if entry.contender is None:
            return self._transformers(entry, case)
        return Timing.of(case.prompt.task, self._generate(entry, case))

    def _generate(self, entry: Entry, case: Case, timed: bool = True) -> Generation:
        """The answer; where it is to be the same at any speed, nothing is learnt from the clock."""
        contender = entry.contender
        assert contender is not None
        contender.reset(self._states[entry.label, entry.regime])
        for calibrator in contender.engine.calibrators.values():
            calibrator.timed = timed
        contender.engine.coupled = entry.regime.coupled
        made = answer(contender.engine, [case.ids], [case.at(entry.regime.temperature)])[0]
        self._fallbacks[entry.label, entry.regime] = contender.engine.fallback  # the engine has other methods, too
        return made

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

    def _whole(self, entry: Entry) -> Generation:
        """An answer that is the same under observation."""
        return self._generate(entry, self.cases[0], timed=False)

    def _beginning(self, entry: Entry) -> Generation:
        """Its first cycle."""
        return self._generate(entry, self.cases[0].cut(1), timed=False)

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
        told["fallback"] = self._fallbacks.get((entry.label, entry.regime)) or None
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
        return sum(_agree(one, other, entry.transformers) for one, other in pairs), len(pairs)


def _agree(plain: tuple[int, ...], own: tuple[int, ...], cut: bool) -> bool:
    """Whether a text is plain decoding's; a cut one, as far as it goes."""
    return own == (plain[: len(own)] if cut else plain)


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
        torch.manual_seed(params.noise_seed)
        started = now(target.device)
        made: Tensor = model.generate(input_ids=given, attention_mask=torch.ones_like(given), assistant_model=helper)
        return tuple(made[0, len(ids) :].tolist()), now(target.device) - started
    finally:
        model.generation_config = own
