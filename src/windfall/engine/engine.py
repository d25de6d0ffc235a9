"""Engine: generates texts with a target, a drafter and a policy; one or several texts, whole or as a stream."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import aclosing
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from windfall import registry
from windfall.checkpoints.find import cache_dir
from windfall.core.constraint import BACKEND_KEYWORD, KEYWORDS, with_constraint
from windfall.core.options import brief, is_number
from windfall.core.types import GpuOptions, InputError, SamplingParams, Step
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import ASSUMED, Costs
from windfall.costs.online import OnlineCosts
from windfall.drafters.base import Drafter
from windfall.engine.background import Background, Check
from windfall.engine.batch_runner import BatchRunner
from windfall.engine.counters import Counters
from windfall.engine.dispatch import SEVERAL_TEXTS, Dispatcher, Route
from windfall.engine.generation import Generation as Generation
from windfall.engine.host_runner import HostRunner
from windfall.engine.lockstep import Lockstep
from windfall.engine.lone_runner import LoneRunner
from windfall.engine.memory import as_bytes, default_bytes
from windfall.engine.paged_host_runner import PagedHostRunner, share_pages
from windfall.engine.prompts import Prompt as Prompt
from windfall.engine.prompts import PromptEncoder
from windfall.engine.request import Handle, Request, Sink
from windfall.engine.sequence import Sequence
from windfall.engine.serial_runner import SerialRunner
from windfall.engine.service import Service
from windfall.engine.split_runner import SplitRunner
from windfall.grammar.base import Grammar
from windfall.grammar.compile import Grammars
from windfall.kernels.cpu_layers import prepare_layer_kernels
from windfall.kernels.few_rows import prepare_few_rows, use_few_rows
from windfall.kernels.packed import packed_formats
from windfall.model.cpu_layers import use_cpu_layers
from windfall.model.decoder import tree_attention
from windfall.model.target import Target
from windfall.policies.base import TreePolicy

if TYPE_CHECKING:
    from windfall.engine.gpu.batch.build import Paged
    from windfall.engine.gpu.batch.runner import GpuBatchRunner
    from windfall.engine.gpu.runner import GpuRunner

WARM_UP_TOKENS = 24
MADE_UP_TOKENS, MADE_UP_NEW_TOKENS = 33, 1024  # of the texts with which a GPU prepares: their prompts, and most others
OnStep = Callable[[Step], None]


class Stream(Iterator[Step]):
    """The Steps of one text. `seed` is that of its draws, `prompt_tokens` the length of its prompt."""

    def __init__(self, steps: Generator[Step, None, None], prompt_tokens: int, seed: int | None):
        self.prompt_tokens, self.seed = prompt_tokens, seed
        self._steps = steps

    def __next__(self) -> Step:
        return next(self._steps)

    def close(self) -> None:
        """Stop generating."""
        self._steps.close()


class Engine:
    """A target, a drafter and a policy. `submit` generates many texts at once; `generate` and the others one at a time.

    All methods may be called by any thread. `generate`, `generate_batch`, `agenerate` and `astream` wait for each
    other. While submitted requests run, they and `stream` become requests, too. Between the steps of a `stream` no
    other generation may begin.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        policy: TreePolicy,
        coupled: bool = True,
        gpu_options: GpuOptions | None = None,
        *,
        max_requests: int | None = None,
        kv_memory: str | int | None = None,
    ):
        """`coupled`: the drafter sees the noise of the draws, where there is any. `max_requests` run together at most,
        if their KV caches fit into `kv_memory` (such as "4GB")."""
        self.target, self.drafter, self.policy, self.coupled = target, drafter, policy, coupled
        self.gpu_options = gpu_options or GpuOptions()
        self.online_costs = OnlineCosts(ASSUMED, learns=False)
        self.calibrators: defaultdict[str, Calibrator] = defaultdict(Calibrator)  # by regime
        self._dispatcher = Dispatcher(target, drafter, self.gpu_options)
        self._route = Route(None, "")  # of the last request
        self._request_numbers = itertools.count(1)
        self._kv_memory = as_bytes(kv_memory)
        self._service = Service(target, max_requests)
        if target.device.type == "cpu" and target.decoder.dtype == torch.float32:
            prepare_few_rows(cache_dir() / "kernels")
            prepare_layer_kernels(cache_dir() / "kernels")
            use_few_rows(target.model)
            use_cpu_layers(target.model)
        drafter.attach(target)

    def __repr__(self) -> str:
        target, dtype = self.target, str(self.target.decoder.dtype).removeprefix("torch.")
        packed = packed_formats(target.model)
        where = f"{target.name!r}, {' and '.join(packed) or dtype}, {target.device}"
        return f"Engine({where}, drafter={brief(self.drafter)}, policy={brief(self.policy)})"

    def generate(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        on_step: OnStep | None = None,
        streamer: Any = None,
        **sampling: Any,
    ) -> Generation:
        """The whole text. Keywords are the fields of SamplingParams; `raw` leaves out the chat template.

        `on_step` is called with every Step, as it happens. `streamer` is one of transformers': its `put` gets the
        prompt and then each token, and its `end` is called when the text has ended.
        """
        ids, params = self.encode(prompt, raw), self.params(**sampling)

        def on_steps(steps: dict[int, Step]) -> None:
            if on_step is not None:
                on_step(steps[0])
            for token in steps[0].tokens if streamer is not None else ():
                streamer.put(torch.tensor([token]))

        try:
            if streamer is not None:
                streamer.put(torch.tensor([ids]))
            with self._service.alone() as alone:
                if alone and not self._decides_in_rounds:
                    return self.decode([ids], [params], on_steps)[0]
            return self._follow(ids, params, on_steps)
        finally:
            if streamer is not None:
                streamer.end()

    async def agenerate(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        on_step: OnStep | None = None,
        streamer: Any = None,
        **sampling: Any,
    ) -> Generation:
        """`generate` for asyncio: a thread decodes, and calls `on_step` and the streamer.

        Several calls are answered one after another. A call that is cancelled stops at its next step.
        """

        def call(check: Check) -> Generation:
            def checked(step: Step) -> None:
                if on_step is not None:
                    on_step(step)
                check()

            return self.generate(prompt, raw=raw, on_step=checked, streamer=streamer, **sampling)

        return await self._background.run(call)

    async def astream(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> AsyncGenerator[Step, None]:
        """`stream` for asyncio, under the same rules as `agenerate`; leaving the loop early stops at the next step."""

        def steps() -> Generator[Step, None, None]:
            ids, params = self.encode(prompt, raw), self.params(**sampling)
            with self._service.alone() as alone:
                if alone and not self._decides_in_rounds:
                    yield from self._own_steps(ids, params)
                    return
            yield from self._request_steps(ids, params)

        async with aclosing(self._background.iterate(steps)) as made:
            async for step in made:
                yield step

    @cached_property
    def _background(self) -> Background:
        return Background(self.target.device)

    def stream(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> Stream:
        """A Step per cycle, as it happens."""
        ids, params = self.encode(prompt, raw), self.params(**sampling).seeded()

        def steps() -> Generator[Step, None, None]:
            as_request = self._service.busy or self._decides_in_rounds
            yield from self._request_steps(ids, params) if as_request else self._own_steps(ids, params)

        return Stream(steps(), len(ids), params.seed)

    def _own_steps(self, ids: list[int], params: SamplingParams) -> Generator[Step, None, None]:
        """The Steps of a text that this thread generates."""
        for cycle in self.run([ids], [params]):
            yield cycle[0]

    def _request_steps(self, ids: list[int], params: SamplingParams) -> Generator[Step, None, None]:
        """The Steps of a text that is generated together with the submitted requests."""
        handle = self._submit(ids, params)
        try:
            yield from handle
        finally:
            handle.cancel()

    def submit(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        policy: TreePolicy | str | None = None,
        deadline: float | None = None,
        resume_token_ids: Many[int] = (),
        **sampling: Any,
    ) -> Handle:
        """Generate a text in the background, together with the other requests; returns at once.

        `tools` are shown to the model by its chat template, in OpenAI's form. `chat_template_kwargs` are variables of
        the template, such as `enable_thinking`. `policy` takes the place of the engine's policy. After `deadline`
        seconds the text ends as it is. `resume_token_ids` are tokens that the text already has, from this engine or
        another one: with the same prompt, seed and sampling, it goes on as it would have there. A request that fails,
        for example in a logits processor, does so alone. Processors and criteria are called in the thread that
        generates.
        """
        ids = self.encode(prompt, raw, tools, chat_template_kwargs)
        how: dict[str, Any] = {"policy": policy, "deadline": deadline, "resume_token_ids": resume_token_ids}
        return self.submit_ids(ids, **how, **sampling)

    def submit_ids(
        self,
        ids: list[int],
        *,
        policy: TreePolicy | str | None = None,
        deadline: float | None = None,
        resume_token_ids: Many[int] = (),
        sink: Sink | None = None,
        **sampling: Any,
    ) -> Handle:
        """`submit` for token ids that `encode` has returned. A `sink` takes the Steps in the place of the handle."""
        if deadline is not None and not (is_number(deadline) and deadline > 0):
            raise InputError(f"deadline takes a number of seconds above 0, not {deadline!r}")
        if not isinstance(policy, TreePolicy | str | None):
            raise InputError(f"a policy is a name or a TreePolicy, not {policy!r}")
        chosen, params = registry.policy(policy) if isinstance(policy, str) else policy, self.params(**sampling)
        return self._submit(ids, params, chosen, deadline, self._checked_resume(resume_token_ids, params), sink)

    def _checked_resume(self, tokens: Many[int], params: SamplingParams) -> list[int]:
        """Token ids to resume from."""
        if not len(tokens):
            return []
        vocabulary = self.target.vocab_size
        if not all(is_number(token, whole=True) and 0 <= token < vocabulary for token in tokens):
            raise InputError(f"resume_token_ids takes token ids between 0 and {vocabulary - 1}")
        if not params.greedy and params.seed is None:
            raise InputError("resume_token_ids needs the seed that the text began with, or temperature 0")
        return list(tokens)

    def _submit(
        self,
        ids: list[int],
        params: SamplingParams,
        policy: TreePolicy | None = None,
        deadline: float | None = None,
        resume: list[int] | None = None,
        sink: Sink | None = None,
    ) -> Handle:
        request = self._request(ids, params, policy, deadline, sink)
        request.sequence.resume(resume or [])
        if (ending := request.sequence.finish) is not None:
            request.end(ending)
        else:
            self._service.submit(request, self._batch_runner, self.policy)
        return Handle(request)

    def _request(
        self,
        ids: list[int],
        params: SamplingParams,
        policy: TreePolicy | None = None,
        deadline: float | None = None,
        sink: Sink | None = None,
    ) -> Request:
        own = (policy or self.policy).fresh()
        grammar = self._grammar(params)
        sequence = Sequence(ids, params.seeded(), own, self.target, self.coupled, self.calibrators, grammar)
        self.drafter.expect(sequence.end)
        self._route = Route(None, SEVERAL_TEXTS)
        return Request(next(self._request_numbers), sequence, deadline, sink)

    def _follow(
        self, ids: list[int], params: SamplingParams, on_steps: Callable[[dict[int, Step]], None]
    ) -> Generation:
        """Generate a text as a request, and call `on_steps` in this thread."""
        handle = self._submit(ids, params)
        try:
            for step in handle:
                on_steps({0: step})
            return handle.result()
        finally:
            handle.cancel()

    @property
    def _decides_in_rounds(self) -> bool:
        """Whether the policy is a budget without a plan, which a GPU runs in batches only: a text is a batch of one."""
        if self.policy.cached_plan is not None or self.policy.budget() is None:
            return False
        return self._paged_runner() is not None

    def _paged(self) -> Paged | None:
        return self._dispatcher.paged(self.policy, self.online_costs, self.max_requests, self._kv_memory)

    def _paged_runner(self) -> GpuBatchRunner | None:
        paged = self._paged()
        return None if paged is None else paged.rounds

    def _batch_runner(self) -> BatchRunner:
        paged = self._paged()
        if paged is None or paged.target is None:
            return self._unpaged_runner()
        alone, rounds = SerialRunner(self._steps_alone), paged.rounds
        on_host = PagedHostRunner(paged.target, paged.drafter or self.drafter, self.online_costs)
        if rounds is None:
            return LoneRunner(alone, on_host)
        together = SplitRunner(rounds, LoneRunner(alone, on_host), rounds.suits, partial(share_pages, rounds, on_host))
        return LoneRunner(SerialRunner(self._steps_alone), together) if rounds.undrafted else together

    def _unpaged_runner(self) -> BatchRunner:
        """Decodes requests where there is no KV cache in pages."""
        if self.exact_passes:
            return SerialRunner(self._steps_alone)
        memory = default_bytes(self.target.device) if self._kv_memory is None else self._kv_memory
        device, on_gpu = self.target.device, self.online_costs.learns and self.gpu_runner is not None
        return HostRunner(self.target, self.drafter, device, self.online_costs, on_gpu, memory=memory)

    def _steps_alone(self, sequence: Sequence) -> Iterator[Step]:
        """The Steps of a sequence that shares no pass with others."""
        return (steps[0] for steps in self._cycles([sequence], None))

    def prepare(
        self, temperatures: Many[float] = (0.0, 1.0), progress: Callable[[float], None] = lambda share: None
    ) -> None:
        """Let a GPU prepare for batches of up to `max_requests`, which takes seconds.

        It captures the usual passes of requests with these temperatures, and measures them. Otherwise this happens
        while requests run. On a CPU, or while requests run, this does nothing.
        """
        with self._service.alone() as alone:
            paged = self._paged() if alone else None
            if paged is None or paged.target is None:
                return
            from windfall.engine.gpu.batch.rehearsal import rehearse

            with tree_attention(self.target.model):
                self.target.texts += 1
                paged.target.capture()
                if paged.rounds is None:
                    progress(1.0)
                    return
                for place, temperature in enumerate(temperatures):
                    for share in rehearse(paged.rounds, partial(self._made_up_texts, temperature)):
                        progress((place + share) / len(temperatures))

    def _made_up_texts(self, temperature: float, count: int, length: int) -> list[Sequence]:
        """Texts to prepare a GPU with, of at most `length` tokens."""
        new_tokens = max(min(MADE_UP_NEW_TOKENS, length - MADE_UP_TOKENS), 1)
        params = SamplingParams(max_new_tokens=new_tokens, temperature=temperature, eos=())
        chance = torch.Generator().manual_seed(0)
        ids = torch.randint(self.target.vocab_size, (count, MADE_UP_TOKENS), generator=chance).tolist()
        made = partial(Sequence, params=params.seeded(), target=self.target, coupled=self.coupled)
        return [made(each, policy=self.policy.fresh(), calibrators=self.calibrators) for each in ids]

    @property
    def max_requests(self) -> int:
        """The largest number of requests that run together."""
        return self._service.max_requests

    @property
    def counters(self) -> Counters:
        """Numbers of all requests so far."""
        return self._service.counters

    @property
    def running(self) -> int:
        """The number of submitted requests that run."""
        return self._service.running

    @property
    def waiting(self) -> int:
        """The number of submitted requests that wait for a place or for memory."""
        return self._service.waiting

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the device is lost."""
        return self._service.closed

    @property
    def lost(self) -> Exception | None:
        """The error after which the device can no longer be used in this process; None: it is well."""
        return self._service.lost

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call this, in any thread, when the device is lost."""
        self._service.when_lost(call)

    def call_after_rounds(self, call: Callable[[], None]) -> None:
        """Call this after each round of submitted requests, in the thread that generates."""
        self._service.round_calls.append(call)

    def close(self) -> None:
        """Cancel all submitted requests and end the engine's threads; `submit` then raises a RuntimeError."""
        self._service.close()
        if "_background" in self.__dict__:
            self._background.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate_batch(self, prompts: Many[Prompt], *, raw: bool = False, **sampling: Any) -> list[Generation]:
        """Several texts, decoded together, up to `max_requests` at a time; each is the text that `generate` gives."""
        if isinstance(prompts, str | dict):
            raise InputError("generate_batch takes a list of prompts; for a single one there is generate")
        encoded, params = [self.encode(prompt, raw) for prompt in prompts], self.params(**sampling)
        own = [params.with_own_state() for _ in encoded] if len(encoded) > 1 else [params]
        with self._service.alone() as alone:
            if alone and len(encoded) == 1 and not self._decides_in_rounds:
                return self.decode(encoded, own)
            requests = list(map(self._request, encoded, own))
            if alone:
                self._service.run(requests, self._batch_runner)
                return [request.generation() for request in requests]
        try:
            for request in requests:
                self._service.submit(request, self._batch_runner, self.policy)
            return [Handle(request).result() for request in requests]
        finally:
            for request in requests:
                request.cancelled = True

    def decode(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        on_steps: Callable[[dict[int, Step]], None] | None = None,
    ) -> list[Generation]:
        """Decode prompts of token ids together, each with its own sampling; `on_steps` is called after every cycle."""
        steps: list[list[Step]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        params = [own.seeded() for own in params]
        with self.target.turn:
            started = time.perf_counter()
            for cycle in self.run(prompts, params):
                now = time.perf_counter() - started
                for i, step in cycle.items():
                    steps[i].append(step)
                    times[i].append(now)
                if on_steps is not None:
                    on_steps(cycle)
        return [
            Generation.of(own, at, len(prompt), drawn.seed)
            for own, at, prompt, drawn in zip(steps, times, prompts, params, strict=True)
        ]

    def run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        lockstep: Lockstep | None = None,
        trial_policy: TreePolicy | None = None,
    ) -> Generator[dict[int, Step], None, None]:
        """Decode these prompts together: per cycle, the Step of every sequence that has not ended yet.

        With `lockstep`, all sequences take each token at the same time. A `trial_policy` takes the place of the
        engine's policy, and the engine learns nothing about acceptance from its cycles.
        """
        policy = trial_policy or self.policy
        calibrators = self.calibrators if trial_policy is None else defaultdict(Calibrator)
        with tree_attention(self.target.model):
            self.target.texts += 1
            number = self.target.texts
            sequences = [
                Sequence(
                    prompt, own.seeded(), policy.fresh(), self.target, self.coupled, calibrators, self._grammar(own)
                )
                for prompt, own in zip(prompts, params, strict=True)
            ]
            cycles = self._cycles(sequences, lockstep)
            while True:
                with self.target.turn:
                    self._check_alone(number)
                    steps = next(cycles, None)
                if steps is None:
                    return
                yield steps

    def _cycles(self, sequences: list[Sequence], lockstep: Lockstep | None) -> Iterator[dict[int, Step]]:
        self.drafter.expect(max(sequence.end for sequence in sequences))
        self._route = self._dispatcher.route(sequences, self.costs)
        runner, fallback = self._route
        if runner is not None and not fallback:
            return self._gpu_cycles(runner, sequences[0])
        target, drafter = (self.target, self.drafter) if runner is None else runner.host_policy_pair(sequences[0])
        costs_are_of_gpu = self.online_costs.learns and self.gpu_runner is not None
        device = self.target.device
        return HostRunner(target, drafter, device, self.online_costs, costs_are_of_gpu, lockstep).run(sequences)

    def _gpu_cycles(self, runner: GpuRunner, sequence: Sequence) -> Iterator[dict[int, Step]]:
        from windfall.engine.gpu.runner import Outdated

        try:
            for step in runner.run(sequence, self.online_costs):
                yield {0: step}
        except Outdated:  # before the first Step
            self._dispatcher.forget_runner()
            yield from self._cycles([sequence], None)

    def _check_alone(self, number: int) -> None:
        if number != self.target.texts:
            raise RuntimeError(
                "another generation has begun on this engine, or on its Target; load a second engine, which has its own"
            )

    @property
    def costs(self) -> Costs:
        """What passes cost, as far as is known. Costs that are set are not corrected by the times of cycles."""
        return self.online_costs.costs

    @costs.setter
    def costs(self, given: Costs) -> None:
        self.online_costs = OnlineCosts(given, learns=False)

    @property
    def gpu_runner(self) -> GpuRunner | None:
        """Decodes single texts on the GPU; None where graphs are off or the models do not allow it."""
        return self._dispatcher.build().runner

    @property
    def gpu_unavailable(self) -> str:
        """Why there is no GPU runner although graphs are on; empty otherwise."""
        return self._dispatcher.build().fallback if self._dispatcher.wants_graphs else ""

    @property
    def exact_passes(self) -> bool:
        """Whether single texts run in exact passes on a GPU, which give plain decoding's text in half precision, too.

        In float32 the text is plain decoding's with any passes.
        """
        runner = self.gpu_runner
        return runner is not None and runner.gpu_target.exact

    @property
    def fallback(self) -> str:
        """Why the GPU runner did not decode the last request; empty if it did."""
        return self._route.fallback

    @property
    def batch_fallback(self) -> str:
        """Why the GPU runner did not decode the last requests that ran together; empty if it did, or none ran yet."""
        return self._dispatcher.batch_fallback

    @property
    def undrafted(self) -> str:
        """Why requests that run together on a GPU are decoded without drafts; empty if they are drafted.

        A request that runs alone is drafted.
        """
        runner = self._paged_runner()
        return "" if runner is None else runner.undrafted

    def warm_up(self, **sampling: Any) -> Iterator[float]:
        """Load kernels and record graphs for this sampling, on a dummy prompt; yields progress from 0 to 1.

        Without it the first generation on a GPU does the same.
        """
        params = self.params(**{**sampling, "max_new_tokens": WARM_UP_TOKENS, "stop": (), "eos": ()})
        done = 0
        for steps in self.run([[0, 0, 0, 0]], [params], trial_policy=self.policy.rehearsal()):
            done += len(steps[0].tokens)
            yield min(done / WARM_UP_TOKENS, 1.0)

    def encode(
        self,
        prompt: Prompt,
        raw: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Text, chat messages or token ids → token ids; text becomes a user's message unless `raw`.

        `tools` are shown to the model by the chat template; `chat_template_kwargs` are variables of the template.
        """
        return self.prompts.encode(prompt, raw, tools, chat_template_kwargs)

    def tokenize(
        self,
        prompt: Prompt,
        raw: bool = False,
        tools: list[dict[str, Any]] | None = None,
        special: bool | None = None,
        generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        limited: bool = False,
    ) -> list[int]:
        """Text or chat messages → token ids, without the checks of `encode`.

        `special`: whether the tokenizer adds its special tokens; None: to text, as a chat template has its own.
        `generation_prompt`: whether the chat template adds the beginning of an answer.
        `chat_template_kwargs`: variables of the chat template. `limited`: refuse a text whose size alone shows that it
        is longer than the context.
        """
        how = (special, generation_prompt, chat_template_kwargs, limited)
        return self.prompts.tokenize(prompt, raw, tools, *how)

    @cached_property
    def prompts(self) -> PromptEncoder:
        """Turns prompts into token ids."""
        return PromptEncoder(self.target)

    def params(self, **sampling: Any) -> SamplingParams:
        """SamplingParams from keywords, checked against this target."""
        known = [*SamplingParams.__dataclass_fields__, *KEYWORDS, BACKEND_KEYWORD]
        if unknown := [name for name in sampling if name not in known]:
            raise InputError(f"there is no sampling option '{unknown[0]}'; there are {', '.join(known)}")
        params = SamplingParams(**with_constraint(sampling))
        if params.stop and self.target.tokenizer is None:
            raise InputError("stop strings need a tokenizer; this target has none")
        if wrong := [token for token in params.logit_bias if not 0 <= token < self.target.vocab_size]:
            raise InputError(f"logit_bias takes token ids between 0 and {self.target.vocab_size - 1}, not {wrong[0]}")
        self._grammar(params)  # a constraint that cannot be used is refused here
        return params

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """The compiled constraint."""
        return None if params.constraint is None else self.grammars.compile(params.constraint)

    @cached_property
    def grammars(self) -> Grammars:
        """The compiled constraints."""
        return Grammars(self.target.tokenizer, self.target.vocab_size, self.target.eos)
