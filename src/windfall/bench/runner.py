"""Runs methods over prompts and stores every finished conversation at once.

Methods take turns, so that slow changes of the machine's speed affect all of them. Every conversation starts from the
same state: the method's calibrators and policy as they were after the warm-up, whose prompts are in no task. The trees
therefore do not depend on the order of the conversations, on an interruption or on the other methods.
"""

from __future__ import annotations

import copy
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from windfall.bench import provenance
from windfall.bench.memory import PeakMemory, peak_apart
from windfall.bench.methods import PLAIN, DrafterSpec, Method
from windfall.bench.paths import shorten
from windfall.bench.reading import Run, load
from windfall.bench.recording import repeated_share, turn_record
from windfall.bench.store import Store
from windfall.bench.suites import PROMPT_TOKENS, Workload
from windfall.bench.tasks import Prompt
from windfall.core.clock import now
from windfall.core.errors import InputError
from windfall.core.files import parse_json
from windfall.core.options import options_of
from windfall.core.sampling import Dice
from windfall.core.types import GpuOptions, SamplingParams
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import Costs
from windfall.drafters.base import Drafter
from windfall.engine import profiling
from windfall.engine.engine import Engine, Generation
from windfall.engine.loading import default_drafter
from windfall.model.target import Target
from windfall.policies.base import TreePolicy
from windfall.policies.none import NoSpeculation
from windfall.prompts.samples import SAMPLES

MAX_WARM_UP_TOKENS = 64  # of the answer to a warm-up prompt
PREFILL_STEP = 32  # tokens: prompts whose lengths differ by less need the same CUDA graphs
MAX_TOKEN_CHARACTERS = 16  # on average; the rest of a long text need not be tokenized
MAX_TEMPLATE_TOKENS = 32  # that a chat template puts around a turn
PROFILE_KEYS = ("costs", "c", "rounds", "steady")  # kept of a profile, which also names models and folders
ANY_DRAFTER = "*"  # stands for its label, where a profile does not name it

Progress = Callable[[int, int], None]  # conversations done, and all of them


@dataclass(frozen=True)
class Part:
    """One suite of a run of several: which methods answer which tasks at which temperatures."""

    suite: str
    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    temperatures: tuple[float, ...]
    memory: bool = False


@dataclass(frozen=True)
class Settings(Workload):
    """The settings of a run; with model, prompts and machine they determine its outcome."""

    seed: int = 0
    batch: int = 1
    timing: bool = True
    coupled: bool = True
    drafter: str = ""
    suite: str | None = None
    graphs: bool | None = None  # this and the next three are those of GpuOptions
    compiled: bool = False
    exact: bool = True
    plans: bool = True
    parts: tuple[Part, ...] = ()  # if empty, every method answers every task

    def __post_init__(self) -> None:
        least = {"repeats": 1, "max_new_tokens": 1, "prompt_tokens": 1, "batch": 1, "warm_up": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise InputError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit must be at least 1, not {self.limit}")
        if self.warm_up > len(SAMPLES):
            raise InputError(f"there are {len(SAMPLES)} prompts to warm up with, not {self.warm_up}")
        if self.batch > 1 and self.timing:
            raise InputError("conversations of a batch share their passes and cannot be timed apart; add --no-timing")
        if self.repeats > 1 and not self.timing and not any(self.temperatures):
            raise InputError("greedy answers repeat themselves: leave out --repeats or --no-timing")
        check_temperatures(self.temperatures)

    def wants(self, method: str, task: str | None, temperature: float) -> bool:
        """Whether a method answers a task (None: any) at a temperature; plain decoding answers all that others do."""
        return not self.parts or any(
            (method == PLAIN or method in part.methods)
            and (task is None or task in part.tasks)
            and temperature in part.temperatures
            for part in self.parts
        )

    def asks(self, task: str) -> bool:
        """Whether any method answers a task."""
        return any(self.wants(PLAIN, task, temperature) for temperature in self.temperatures)

    def measures_memory(self, method: str) -> bool:
        """Whether a method's peak memory is measured separately."""
        return any(p.memory and (method == PLAIN or method in p.methods) for p in self.parts) or (
            self.memory and not self.parts
        )


def check_temperatures(temperatures: Sequence[float]) -> None:
    """Raise an InputError unless these are different and valid sampling temperatures."""
    if not temperatures or len(set(temperatures)) < len(temperatures):
        raise InputError("give each temperature once, for example 0,1")
    for temperature in temperatures:
        SamplingParams(temperature=temperature)


@dataclass(frozen=True)
class State:
    """The state of a method at the start of a conversation."""

    policy: TreePolicy
    calibrators: Mapping[str, Calibrator] = field(default_factory=dict)


@dataclass
class Contender:
    """A method and its engine, which methods with the same drafter share."""

    method: Method
    engine: Engine
    drafter: DrafterSpec | None
    states: dict[float, State] = field(default_factory=dict)  # by temperature, after the warm-up

    def reset(self, state: State) -> None:
        """Start from a copy of this state."""
        self.engine.policy = copy.deepcopy(state.policy)
        self.engine.calibrators = defaultdict(Calibrator, copy.deepcopy(dict(state.calibrators)))

    def about(self) -> dict[str, Any]:
        """The part of a record that describes the method."""
        policy, drafter = self.engine.policy, self.drafter
        settings = {name: getattr(policy, name) for name in options_of(type(policy))}
        return {
            "method": self.method.label,
            "drafter": PLAIN if drafter is None else drafter.short_name,
            "drafter_settings": {} if drafter is None else drafter.public_settings,
            "policy": shorten(self.method.policy),
            "settings": {name: shorten(v) if isinstance(v, str) else v for name, v in settings.items()},
            "coupled": self.engine.coupled,
        }


@dataclass
class NoDrafter(Drafter):
    """The drafter of engines that decode plainly, which never use it."""

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        pass

    def join(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        pass

    def commit(self, trees: Any, paths: Any, bonus: Any, hidden: Any) -> None:
        pass

    def retain(self, keep: list[int]) -> None:
        pass


@dataclass(frozen=True)
class Job:
    """The conversations of one method that are decoded together: one, or a batch."""

    contender: Contender
    prompts: Sequence[Prompt]
    temperature: float
    repeat: int


def run(
    settings: Settings,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    target: Target,
    store: Store,
    drafter: DrafterSpec | None = None,
    profiles: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    trust_remote_code: bool = False,
    progress: Progress = lambda done, total: None,
) -> Run:
    """Run what is not in the store yet, and close the store; returns its whole content."""
    try:
        own = drafter or DrafterSpec(default_drafter(target))
        gpu_options = GpuOptions(settings.graphs, settings.compiled, settings.exact, settings.plans)
        contenders = assemble(methods, target, own, settings.coupled, trust_remote_code, gpu_options)
        engines = {_label(each.drafter): each.engine for each in contenders}
        about = provenance.describe(engines, target, prompts, command)
        known = store.profiles if store.about is not None else profiles
        make_room(engines.values(), target, prompts, settings)
        store.begin(asdict(settings), about, attach_costs(contenders, known))
        unmeasured = [each for each in contenders if each.method.label not in store.peaks]
        for label, peak in measure_memory(unmeasured, prompts, target, own, settings, trust_remote_code, gpu_options):
            store.keep_peak(label, peak)
        Bench(settings, contenders, store, progress).run(prompts)
        return load(store.folder)
    finally:
        store.close()


def assemble(
    methods: Sequence[Method],
    target: Target,
    default: DrafterSpec,
    coupled: bool,
    trust_remote_code: bool = False,
    gpu_options: GpuOptions | None = None,
) -> list[Contender]:
    """Make one engine for each drafter; all share the target's weights, but not its cache."""
    engines: dict[str, Engine] = {}
    specs: dict[str, DrafterSpec | None] = {}
    contenders = []
    for method in methods:
        drafter = None if method.plain else method.drafter or default
        label = _label(drafter)
        if specs.setdefault(label, drafter) != drafter:
            raise InputError(f"two different drafters would be called '{label}'; they need different names")
        if label not in engines:
            own = Target(target.model, target.tokenizer, target.name)
            proposer = NoDrafter() if drafter is None else drafter.make(trust_remote_code)
            engines[label] = Engine(own, proposer, NoSpeculation(), coupled, gpu_options)
        contenders.append(Contender(method, engines[label], drafter))
    return contenders


def make_room(engines: Iterable[Engine], target: Target, prompts: Sequence[Prompt], settings: Settings) -> None:
    """Reserve buffers for the longest conversation, so that they do not grow during the run."""
    from windfall.bench.gpu_internals import reserve, uses_graphs

    used = [engine for engine in engines if uses_graphs(engine)]
    if used and prompts:
        reserve(used, max(_most_tokens(prompt, target, settings) for prompt in prompts))


def _most_tokens(prompt: Prompt, target: Target, settings: Settings) -> int:
    """The length of a conversation with the longest possible answers."""
    replies = len(prompt.turns) * settings.max_new_tokens
    if prompt.raw:
        return settings.prompt_tokens + replies
    asked = replace(prompt, turns=("\n\n".join(prompt.turns),))
    most = prompt_length(asked, target, 0) + replies + MAX_TEMPLATE_TOKENS * len(prompt.turns)
    return min(most, target.context or most)


def measure_memory(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    target: Target,
    default: DrafterSpec,
    settings: Settings,
    trust_remote_code: bool,
    gpu_options: GpuOptions,
) -> Iterator[tuple[str, int]]:
    """The peak memory of methods on the longest prompt, each measured in a new engine; only on CUDA."""
    chosen = [each for each in contenders if settings.measures_memory(each.method.label)]
    if not chosen or target.device.type != "cuda":
        return
    longest = max(prompts, key=lambda prompt: prompt_length(prompt, target, settings.prompt_tokens))
    ids = question(longest, (), contenders[0].engine, settings.prompt_tokens)
    params = SamplingParams(max_new_tokens=settings.max_new_tokens, temperature=0.0, eos=())

    def make(each: Contender) -> Engine:
        (own,) = assemble([each.method], target, default, settings.coupled, trust_remote_code, gpu_options)
        own.engine.policy, own.engine.costs = each.method.make(), each.engine.costs
        return own.engine

    for each in chosen:
        yield each.method.label, peak_apart(target, partial(make, each), ids, params)


def _label(drafter: DrafterSpec | None) -> str:
    return PLAIN if drafter is None else drafter.label


def attach_costs(contenders: Sequence[Contender], known: Mapping[str, Any] | None) -> dict[str, Any]:
    """Give known or measured costs of passes to the engines whose policies use them; returns these costs."""
    used: dict[str, Any] = {}
    for each in contenders:
        label = _label(each.drafter)
        if label in used or not each.method.make().uses_costs:
            continue
        if known is None:
            profile = profiling.load_or_measure(each.engine).as_dict()
        elif (profile := known.get(label, known.get(ANY_DRAFTER))) is None:
            raise InputError(f"the profile has no costs for the drafter {label}; it has: {', '.join(known) or 'none'}")
        used[label] = {name: profile[name] for name in PROFILE_KEYS if name in profile}
        each.engine.costs = Costs.of_dict(used[label]["costs"])
    return used


def read_profiles(file: Path) -> dict[str, Any]:
    """The costs in a run.json by drafter, or those of `windfall profile --json` for any drafter."""
    try:
        given = parse_json(file.read_text("utf-8"))
        found: dict[str, Any] = given.get("profiles", {ANY_DRAFTER: given})
        for profile in found.values():
            Costs.of_dict(profile["costs"])
    except OSError as error:
        raise InputError(f"cannot read '{file}': {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"'{file}' is no profile; give a run.json or what `windfall profile --json` prints") from None
    return found


class Bench:
    """The conversations of a run, and their order."""

    def __init__(self, settings: Settings, contenders: list[Contender], store: Store, progress: Progress):
        self.settings, self.contenders, self.store, self.progress = settings, contenders, store, progress

    def run(self, prompts: Sequence[Prompt]) -> None:
        every = list(self.schedule(prompts))
        jobs = [job for job in every if self._missing(job)]
        total = sum(len(job.prompts) for job in every)
        self.progress(len(self.store.done), total)
        if jobs:
            self._warm_up(prompts)
        for job in jobs:
            for record in self._converse(job):
                self.store.append(record)
            self.progress(len(self.store.done), total)

    def schedule(self, prompts: Sequence[Prompt]) -> Iterator[Job]:
        """All jobs in order: for each prompt and temperature every method has a turn, and the first one alternates."""
        size, count = self.settings.batch, len(self.contenders)
        chunks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        for repeat in range(self.settings.repeats):
            for place, chunk in enumerate(chunks):
                for turn, temperature in enumerate(self.settings.temperatures, place + repeat):
                    for shift in range(count):
                        contender = self.contenders[(turn + shift) % count]
                        label = contender.method.label
                        own = [prompt for prompt in chunk if self.settings.wants(label, prompt.task, temperature)]
                        if own:
                            yield Job(contender, own, temperature, repeat)

    def _missing(self, job: Job) -> list[Prompt]:
        method, rest = job.contender.method.label, (job.temperature, job.repeat)
        return [p for p in job.prompts if (method, p.task, p.id, *rest) not in self.store.done]

    def _warm_up(self, prompts: Sequence[Prompt]) -> None:
        """Let every method answer a few prompts at every temperature, and keep what it learned as its initial state."""
        from windfall.bench.gpu_internals import uses_graphs

        kept, learned = self.store.warm_up, {}
        tokens = min(MAX_WARM_UP_TOKENS, self.settings.max_new_tokens)
        for contender in self.contenders:
            label = contender.method.label
            if uses_graphs(contender.engine):
                contender.reset(State(contender.method.make()))
                self._capture_prefills(contender.engine, prompts)
            own = [each for each in self.settings.temperatures if self.settings.wants(label, None, each)]
            for temperature in own:
                contender.reset(State(contender.method.make()))
                for sample in SAMPLES[: self.settings.warm_up]:
                    params = self._params(temperature, self.settings.seed, tokens)
                    ids = contender.engine.tokenize(sample)[-room(contender.engine.target, tokens) :]
                    answer(contender.engine, [ids], [params])
                name = f"{label} {temperature:g}"
                contender.engine.target.decoder.reset(0)
                calibrators = contender.engine.calibrators
                learned[name] = kept.get(name) or {regime: own.as_dict() for regime, own in calibrators.items()}
                restored = {regime: Calibrator.of_dict(own) for regime, own in learned[name].items()}
                contender.states[temperature] = State(contender.engine.policy, restored)
        self.store.keep_warm_up(learned)

    def _capture_prefills(self, engine: Engine, prompts: Sequence[Prompt]) -> None:
        """Prefill a prompt of each length, so that the CUDA graphs for them are captured before anything is timed."""
        asked = [question(prompt, [], engine, self.settings.prompt_tokens) for prompt in prompts]
        for ids in {len(ids) // PREFILL_STEP: ids for ids in asked}.values():
            answer(engine, [ids], [SamplingParams(max_new_tokens=1)])

    def _params(self, temperature: float, seed: int, tokens: int) -> SamplingParams:
        eos = () if self.settings.ignore_eos else None
        return SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=seed, eos=eos)

    def _converse(self, job: Job) -> list[dict[str, Any]]:
        """Run these conversations turn by turn as one batch; returns the records that were missing."""
        contender, engine = job.contender, job.contender.engine
        contender.reset(contender.states[job.temperature])
        seeds = [seed_of(self.settings.seed, job.repeat, prompt) for prompt in job.prompts]
        conversations = [Conversation(*each) for each in zip(job.prompts, seeds, strict=True)]
        memory = PeakMemory(engine.target.device)
        while live := [each for each in conversations if each.ask(engine, self.settings)]:
            params = [self._params(job.temperature, each.seed, self.settings.max_new_tokens) for each in live]
            answers = answer(engine, [each.ids for each in live], params)
            for each, generation in zip(live, answers, strict=True):
                each.take(generation, self.settings.timing)
        peak, missing = memory.peak if self.settings.batch == 1 else None, self._missing(job)
        engine.target.decoder.reset(0)  # free the cache for the next method
        about = {**contender.about(), "temperature": job.temperature, "repeat": job.repeat, "peak_memory": peak}
        return [{**about, **each.record()} for each in conversations if each.prompt in missing]


class Conversation:
    """One conversation while it runs."""

    def __init__(self, prompt: Prompt, seed: int):
        self.prompt, self.seed = prompt, seed
        self.ids: list[int] = []  # the next question, with all that came before
        self.turns: list[dict[str, Any]] = []
        self._replies: list[Generation] = []

    def ask(self, engine: Engine, settings: Settings) -> bool:
        """Prepare the next question; False if there is none, or no room for its answer."""
        if len(self.turns) == len(self.prompt.turns):
            return False
        self.ids = question(self.prompt, [reply.text for reply in self._replies], engine, settings.prompt_tokens)
        return len(self.ids) <= room(engine.target, settings.max_new_tokens)

    def take(self, generation: Generation, timed: bool) -> None:
        self._replies.append(generation)
        self.turns.append(turn_record(generation, len(self.ids), timed))

    def record(self) -> dict[str, Any]:
        prompt = self.prompt
        about = {"task": prompt.task, "category": prompt.category, "id": prompt.id, "seed": self.seed}
        repeated = repeated_share([reply.token_ids for reply in self._replies])
        return {**about, "turns": self.turns, "repeated": repeated}


def question(prompt: Prompt, replies: Sequence[str], engine: Engine, prompt_tokens: int) -> list[int]:
    """The token ids of the conversation up to the next question; a raw text is cut to `prompt_tokens`."""
    if prompt.raw:
        return engine.tokenize(prompt.turns[0][: MAX_TOKEN_CHARACTERS * prompt_tokens], raw=True)[:prompt_tokens]
    asked = prompt.turns[: len(replies) + 1]
    if not getattr(engine.target.tokenizer, "chat_template", None):
        return engine.tokenize("\n\n".join(_alternate(asked, replies)))
    said = zip(("user", "assistant") * len(asked), _alternate(asked, replies), strict=False)
    return engine.tokenize([{"role": role, "content": content} for role, content in said])


def _alternate(asked: Sequence[str], replies: Sequence[str]) -> list[str]:
    return [text for pair in zip(asked, [*replies, ""], strict=True) for text in pair][:-1]


@dataclass(frozen=True)
class Case:
    """A prompt's first question as token ids, and how its answer is drawn."""

    prompt: Prompt
    ids: list[int]
    params: SamplingParams

    def cut(self, tokens: int) -> Case:
        """The same with an answer of at most this many tokens."""
        return replace(self, params=replace(self.params, max_new_tokens=min(tokens, self.params.max_new_tokens)))

    def at(self, temperature: float) -> SamplingParams:
        return replace(self.params, temperature=temperature)


def first_questions(
    prompts: Sequence[Prompt], engine: Engine, seed: int, prompt_tokens: int = PROMPT_TOKENS, **sampling: Any
) -> list[Case]:
    """The first questions of the prompts that leave room for an answer in the target's context."""
    tokens = sampling["max_new_tokens"]
    asked = [(prompt, question(prompt, (), engine, prompt_tokens)) for prompt in prompts]
    fitting = [(prompt, ids) for prompt, ids in asked if len(ids) <= room(engine.target, tokens)]
    if not fitting:
        raise InputError(f"no prompt fits the context of {engine.target.name} with {tokens} new tokens")
    return [Case(p, ids, engine.params(seed=seed_of(seed, 0, p), **sampling)) for p, ids in fitting]


def fitting(prompts: Sequence[Prompt], target: Target, settings: Settings) -> list[Prompt]:
    """The prompts whose first answer fits into the target's context."""
    most = room(target, settings.max_new_tokens)
    return [prompt for prompt in prompts if prompt_length(prompt, target, settings.prompt_tokens) <= most]


def prompt_length(prompt: Prompt, target: Target, prompt_tokens: int) -> int:
    """The length of the first question in tokens."""
    return len(question(prompt, (), Engine(target, NoDrafter(), NoSpeculation()), prompt_tokens))


def room(target: Target, tokens: int) -> int:
    """The longest prompt that leaves room for this many new tokens."""
    context = target.context
    return 2**31 if context is None else max(context - tokens, 0)


def seed_of(seed: int, repeat: int, prompt: Prompt) -> int:
    """A seed that differs by prompt and repeat, and is the same for every method."""
    name = f"{seed} {repeat} {prompt.task} {prompt.id}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


def answer(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Generation]:
    """Decode a batch, each prompt with its own seed."""
    now(engine.target.device)  # waits for work that the previous answer left on the device
    return engine.decode(prompts, params)
