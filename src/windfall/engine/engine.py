"""The decode loop: it carries trees from drafter to policy to target, and yields what was accepted."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from collections.abc import Sequence as Many
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError

from windfall.checkpoints.quiet_libs import first_line
from windfall.core.clock import Stopwatch, now
from windfall.core.files import is_unicode
from windfall.core.options import brief
from windfall.core.stats import Stats
from windfall.core.tree import MAX_TREE_NODES, DraftTree
from windfall.core.types import GpuOptions, Grow, InputError, SamplingParams, Step
from windfall.core.wording import counted
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import ASSUMED, Costs
from windfall.costs.online import OnlineCosts
from windfall.drafters.base import Drafter
from windfall.engine.background import Background, Stop
from windfall.engine.lockstep import Lockstep
from windfall.engine.sequence import Sequence
from windfall.model.decoder import tree_attention
from windfall.model.target import Target
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context

if TYPE_CHECKING:
    from windfall.engine.gpu.host_policy import GraphTarget
    from windfall.engine.gpu.runner import GpuRunner

WARM_UP = 24  # tokens
USUAL = 16  # tokens that a drafter has to take in at the most, if it drafted in the last cycle
OnStep = Callable[[Step], None]
Prompt = Any  # text, chat messages ({"role", "content"}), or token ids


@dataclass(frozen=True)
class Generation:
    """A finished text, and how it was generated."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop", "length" or "interrupted"
    steps: list[Step] = field(repr=False)
    stats: Stats

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return self.stats.prompt_tokens

    @property
    def seed(self) -> int | None:
        """The seed of the draws: with it the same prompt gives the same text. None: greedy, and none was given."""
        return self.stats.seed

    @classmethod
    def of(
        cls, steps: list[Step], times: list[float], prefill: float, prompt_tokens: int = 0, seed: int | None = None
    ) -> Generation:
        """Fold Steps and the seconds after the start at which each came."""
        last, first = (times[-1], times[0]) if times else (0.0, 0.0)
        return cls(
            text="".join(step.text for step in steps),
            token_ids=[token for step in steps for token in step.tokens],
            finish_reason=(steps and steps[-1].finish) or "interrupted",
            steps=steps,
            stats=Stats.of(steps, last, first, prefill, prompt_tokens, seed),
        )


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
    """A target, a drafter and a policy. One generation (of one or several texts) at a time.

    `generate`, `generate_batch`, `agenerate` and `astream` wait for each other, in whichever threads or tasks they are
    called. Between the steps of a `stream` no other generation may begin.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        policy: TreePolicy,
        coupled: bool = True,
        launch: GpuOptions | None = None,
    ):
        self.target, self.drafter, self.policy = target, drafter, policy
        self.coupled = coupled  # whether the drafter sees the noise of the draws, where there is any
        self.launch = launch or GpuOptions()
        self.online_costs = OnlineCosts(ASSUMED, learns=False)
        self.calibrators: defaultdict[str, Calibrator] = defaultdict(Calibrator)  # by regime
        drafter.attach(target)
        self.prefill_seconds = 0.0
        self._made: tuple[GpuRunner | None, str] | None = None
        self.fallback = ""  # why the last text did not stay on the device altogether

    def __repr__(self) -> str:
        target, dtype = self.target, str(self.target.decoder.dtype).removeprefix("torch.")
        where = f"{target.name!r}, {dtype}, {target.device}"
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
        if streamer is None:
            return self.decode([ids], [params], _of_single(on_step))[0]
        try:
            streamer.put(torch.tensor([ids]))
            return self.decode([ids], [params], _of_single(on_step, partial(_put, streamer)))[0]
        finally:
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

        def call(stop: Stop) -> Generation:
            stop.check()

            def heed(step: Step) -> None:
                if on_step is not None:
                    on_step(step)
                stop.check()

            return self.generate(prompt, raw=raw, on_step=heed, streamer=streamer, **sampling)

        return await self._background.run(call)

    async def astream(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> AsyncGenerator[Step, None]:
        """`stream` for asyncio, under the same rules as `agenerate`; leaving the loop early stops at the next step."""

        def steps() -> Generator[Step, None, None]:
            with self.target.turn:
                yield from self.stream(prompt, raw=raw, **sampling)

        async with aclosing(self._background.iterate(steps)) as made:
            async for step in made:
                yield step

    @cached_property
    def _background(self) -> Background:
        return Background(self.target.device)

    def stream(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> Stream:
        """A Step per cycle, as it happens."""
        ids, params = self.encode(prompt, raw), self.params(**sampling).seeded()
        return Stream((steps[0] for steps in self.run([ids], [params])), len(ids), params.seed)

    def generate_batch(self, prompts: Many[Prompt], *, raw: bool = False, **sampling: Any) -> list[Generation]:
        """Several texts, decoded together; each is what `generate` would have given."""
        if isinstance(prompts, str | dict):
            raise InputError("generate_batch takes a list of prompts; for a single one there is generate")
        encoded, params = [self.encode(prompt, raw) for prompt in prompts], self.params(**sampling)
        if not encoded:
            return []
        return self.decode(encoded, [params.with_own_state() for _ in encoded] if len(encoded) > 1 else [params])

    def decode(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        on_steps: Callable[[dict[int, Step]], None] | None = None,
    ) -> list[Generation]:
        """Decode prompts of token ids together, each with its own sampling; `on_steps` is called after every cycle."""
        with self.target.turn:
            return self._decode(prompts, params, on_steps)

    def _decode(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        on_steps: Callable[[dict[int, Step]], None] | None,
    ) -> list[Generation]:
        steps: list[list[Step]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        params = [own.seeded() for own in params]
        started = time.perf_counter()
        for cycle in self.run(prompts, params):
            now = time.perf_counter() - started
            for i, step in cycle.items():
                steps[i].append(step)
                times[i].append(now)
            if on_steps is not None:
                on_steps(cycle)
        return [
            Generation.of(own, at, self.prefill_seconds, len(prompt), drawn.seed)
            for own, at, prompt, drawn in zip(steps, times, prompts, params, strict=True)
        ]

    def run(
        self, prompts: list[list[int]], params: list[SamplingParams], lockstep: Lockstep | None = None
    ) -> Generator[dict[int, Step], None, None]:
        """Decode these prompts together: per cycle, the Step of every sequence that has not ended yet.

        With `lockstep`, all sequences take each token at the same time.
        """
        with tree_attention(self.target.model):
            yield from self._run(prompts, params, lockstep)

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], lockstep: Lockstep | None
    ) -> Iterator[dict[int, Step]]:
        self.target.texts += 1
        text, started = self.target.texts, time.perf_counter()
        sequences = [
            Sequence(prompt, own.seeded(), self.policy.fresh(), self.target, self.coupled)
            for prompt, own in zip(prompts, params, strict=True)
        ]
        if lockstep is not None:
            lockstep.sequences = sequences
        target: Target | GraphTarget = self.target
        drafter = self.drafter
        drafter.expect(max(sequence.end for sequence in sequences))
        if resident := self._resident(sequences):
            if not self.fallback:
                for step in resident.run(self, sequences[0]):
                    yield {0: step}
                    self._check_alone(text)
                return
            target, drafter = resident.seats(sequences[0])
        hidden = target.prefill(prompts, drafter.taps)
        drafter.start(prompts, hidden, [sequence.dice for sequence in sequences])
        self.prefill_seconds = now(self.target.device) - started
        live = dict(enumerate(sequences))
        while live:
            self._check_alone(text)
            steps = dict(zip(live, self._cycle(list(live.values()), target, drafter, lockstep), strict=True))
            self._check_alone(text)
            going = [place for place, sequence in enumerate(live.values()) if not sequence.finish]
            if 0 < len(going) < len(live):
                target.retain(going)
                drafter.retain(going)
            live = {i: sequence for i, sequence in live.items() if not sequence.finish}
            yield steps

    @property
    def costs(self) -> Costs:
        """What passes are believed to cost; those that are set are taken as given."""
        return self.online_costs.costs

    @costs.setter
    def costs(self, given: Costs) -> None:
        self.online_costs = OnlineCosts(given, learns=False)

    @property
    def graphs(self) -> bool:
        """Whether single texts are to stay on the device."""
        asked = self.launch.graphs
        return self.target.device.type == "cuda" if asked is None else asked

    @property
    def resident(self) -> GpuRunner | None:
        """What holds single texts on the device, where that is possible; else `unfit` says why not."""
        if self._made is None and not self.graphs:
            self._made = None, "graphs are off"
        elif self._made is None:
            from windfall.engine.gpu.runner import GpuRunner

            self._made = GpuRunner.of(self.target, self.drafter, self.launch)
        return self._made[0]

    @property
    def unfit(self) -> str:
        """Why no text can stay on the device; nothing if some can."""
        return self._made[1] if self.resident is None and self._made is not None else ""

    def _resident(self, sequences: list[Sequence]) -> GpuRunner | None:
        """The same for these texts; where `fallback` is not empty, policy and sampling at least stay on the host."""
        if len(sequences) > 1 or len(sequences[0].tokens) < 2:
            self.fallback = "several texts go together" if len(sequences) > 1 else "its prompt is a single token"
            return None
        if self._made is not None and self._made[0] is not None and self._made[0].outdated:
            self._made = None
        resident, (sequence,) = self.resident, sequences
        context = sequence.context(self.costs, self.calibrators[sequence.regime])
        self.fallback = self.unfit if resident is None else resident.refuses(sequence, context)
        return resident

    def warm_up(self, **sampling: Any) -> Iterator[float]:
        """Load and record what generating with this sampling needs, on a text of no matter; yields the finished share.

        Without it the first generation on a GPU does the same, silently.
        """
        params = self.params(**{**sampling, "max_new_tokens": WARM_UP, "stop": (), "eos": ()})
        kept, self.calibrators = self.calibrators, defaultdict(Calibrator)
        policy, self.policy = self.policy, self.policy.rehearsal()  # some learn over all texts
        done = 0
        try:
            for steps in self.run([[0, 0, 0, 0]], [params]):
                done += len(steps[0].tokens)
                yield min(done / WARM_UP, 1.0)
        finally:
            self.calibrators, self.policy = kept, policy

    def _check_alone(self, text: int) -> None:
        if text != self.target.texts:
            raise RuntimeError(
                "another generation has begun on this engine, or on its Target; load a second engine, which has its own"
            )

    @torch.inference_mode()
    def _cycle(
        self,
        live: list[Sequence],
        target: Target | GraphTarget,
        drafter: Drafter,
        lockstep: Lockstep | None = None,
    ) -> list[Step]:
        before = target.recordings
        alone = self.online_costs.learns and len(live) == 1  # else sequences share the passes
        online_costs = self.online_costs if alone else None
        clock = Stopwatch()
        contexts = [s.context(self.costs, self.calibrators[s.regime], online_costs) for s in live]
        passes: list[tuple[int, float]] = []  # nodes and seconds of those that brought something
        drafted = drafter.begin([sequence.tokens[-1] for sequence in live])
        growth = [Growth(sequence.policy, context) for sequence, context in zip(live, contexts, strict=True)]
        while any(grows := [grower.next(tree) for grower, tree in zip(growth, drafted, strict=True)]):
            clock.lap("policy")
            known, drafted = sum(map(len, drafted)), drafter.expand(drafted, grows)
            taken = clock.lap("draft")
            if sum(map(len, drafted)) > known:
                passes.append((sum(len(grow.nodes) for grow in grows if grow), taken))
        kept = [s.policy.select(tree, ctx) for s, tree, ctx in zip(live, drafted, contexts, strict=True)]
        trees = [tree.select(keep) for tree, keep in zip(drafted, kept, strict=True)]
        clock.lap("policy")

        scores = target.score(trees)
        if lockstep is None:
            verdicts = [s.judge(tree, score) for s, tree, score in zip(live, trees, scores, strict=True)]
        else:
            verdicts = lockstep.judge(live, trees, scores)
        target.commit([verdict.path for verdict in verdicts])
        verifying = clock.lap("verify")

        paths = [  # as nodes of `drafted`
            torch.from_numpy(keep.numpy()[verdict.path.numpy()]) for keep, verdict in zip(kept, verdicts, strict=True)
        ]
        states = [
            target.states(score.hidden, verdict.path)
            for score, verdict in zip(scores, verdicts, strict=True)
            if score.hidden is not None
        ]
        drafter.commit(drafted, paths, [verdict.bonus for verdict in verdicts], states or None)
        clock.lap("draft")

        recorded = target.recordings > before
        emitted = [s.accept(tree, verdict) for s, tree, verdict in zip(live, trees, verdicts, strict=True)]
        clock.lap("other")
        steps = [
            Step(tokens, text, tree, verdict.path, full, keep, grower.passes, clock.split, sequence.finish, recorded)
            for (tokens, text), tree, verdict, full, keep, grower, sequence in zip(
                emitted, trees, verdicts, drafted, kept, growth, live, strict=True
            )
        ]
        if online_costs is not None and not recorded:
            self._book(online_costs, live[0], contexts[0].length, passes, len(trees[0]), verifying)
        for sequence, step in zip(live, steps, strict=True):
            sequence.policy.observe(step)
            self.calibrators[sequence.regime].observe(step)
        clock.lap("policy")
        return [replace(step, seconds=clock.split) for step in steps]

    def _book(
        self,
        online_costs: OnlineCosts,
        sequence: Sequence,
        length: int,
        passes: list[tuple[int, float]],
        rows: int,
        verifying: float,
    ) -> None:
        """Learn from a cycle what its passes take; where passes on the device were measured, these take longer."""
        slower = self.resident is not None
        if passes:
            online_costs.record_drafts([0], passes[0][1], slower or length - sequence.drafted > USUAL)
            sequence.drafted = length
        for width, seconds in passes[1:]:
            online_costs.record_drafts([width], seconds, slower)
        online_costs.record_verify(rows, length, verifying, slower)

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Text, chat messages or token ids → token ids; text becomes a user's message unless `raw`."""
        ids = self.tokenize(prompt, raw) if _is_worded(prompt) else _as_ids(prompt)
        context, vocabulary = self.target.context, self.target.vocab_size
        if not ids:
            raise InputError("the prompt is empty")
        if context is not None and len(ids) >= context:
            raise InputError(
                f"the prompt has {counted(len(ids), 'token')}; {self.target.name} takes {context - 1} at most"
            )
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise InputError(f"token ids must be between 0 and {vocabulary - 1}")
        return ids

    def tokenize(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Text or chat messages → token ids, however many."""
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise InputError("this target has no tokenizer; give the prompt as token ids")
        try:
            if isinstance(prompt, str) and (raw or not tokenizer.chat_template):
                return list(tokenizer(prompt).input_ids)
            if not tokenizer.chat_template:
                raise InputError(f"{self.target.name} has no chat template; give the prompt as text")
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        except TypeError as error:
            told = "the prompt is not valid Unicode text"
            if not isinstance(prompt, str) and all(is_unicode(str(message.get("content"))) for message in prompt):
                told = f"a chat message is {{'role': text, 'content': text}}; the template says: {first_line(error)}"
            raise InputError(told) from None
        except TemplateError as error:
            raise InputError(f"the chat template of {self.target.name} refuses these messages: {error}") from None

    def params(self, **sampling: Any) -> SamplingParams:
        """SamplingParams from keywords, held to what this target can do."""
        known = SamplingParams.__dataclass_fields__
        if unknown := [name for name in sampling if name not in known]:
            raise InputError(f"there is no sampling option '{unknown[0]}'; there are {', '.join(known)}")
        params = SamplingParams(**sampling)
        if params.stop and self.target.tokenizer is None:
            raise InputError("stop strings need a tokenizer; this target has none")
        if params.logit_bias and not 0 <= min(params.logit_bias) <= max(params.logit_bias) < self.target.vocab_size:
            raise InputError(f"logit_bias takes token ids between 0 and {self.target.vocab_size - 1}")
        return params


def _of_single(*calls: OnStep | None) -> Callable[[dict[int, Step]], None] | None:
    """These callbacks of a single text, as one for `decode`."""
    wanted = [call for call in calls if call is not None]

    def tell(steps: dict[int, Step]) -> None:
        for call in wanted:
            call(steps[0])

    return tell if wanted else None


def _put(streamer: Any, step: Step) -> None:
    for token in step.tokens:
        streamer.put(torch.tensor([token]))


def _is_worded(prompt: Prompt) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(m, dict) for m in prompt)


def _as_ids(prompt: Prompt) -> list[int]:
    """Token ids as a list, from a list or tensor of one prompt."""
    if isinstance(prompt, str) or (isinstance(prompt, list | tuple) and not prompt):
        raise InputError("the prompt is empty")
    try:
        ids = torch.as_tensor(prompt)
        whole = ids.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
        found: list[int] = ids.flatten().tolist() if ids.numel() == ids.shape[-1] else []
    except (TypeError, ValueError, RuntimeError, IndexError):
        whole = False
    if not whole or not found:
        raise InputError("a prompt is text, a list of chat messages, or the token ids of one prompt")
    return found


class Growth:
    """Asks a policy for its next draft pass and holds it to what is possible."""

    def __init__(self, policy: TreePolicy, context: Context):
        self.policy, self.context = policy, context
        self.passes = 0
        self._expanded: set[int] = set()
        self._over = False

    def next(self, tree: DraftTree) -> Grow | None:
        """The policy's wish, without nodes that were expanded before or lie too deep to be emitted."""
        grow = None if self._over else self.policy.grow(tree, self.context)
        nodes = [] if grow is None else self._possible(tree, grow)
        if grow is None or not nodes:
            self._over = True
            return None
        if (size := len(tree) + len(nodes) * grow.k) > MAX_TREE_NODES:
            raise InputError(
                f"a draft tree has {MAX_TREE_NODES} nodes at most; this pass would make {size}: use fewer children"
            )
        self._expanded.update(nodes)
        self.passes += 1
        return grow if len(nodes) == grow.nodes.numel() else grow._replace(nodes=torch.tensor(nodes))

    def _possible(self, tree: DraftTree, grow: Grow) -> list[int]:
        deepest = self.context.room - 2  # a child at depth room - 1 and the target's own token fill the room
        nodes, depths = grow.nodes.tolist(), tree.arrays.depth[grow.nodes.numpy()].tolist()
        return [n for n, depth in zip(nodes, depths, strict=True) if depth <= deepest and n not in self._expanded]
