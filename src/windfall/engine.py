"""The decode loop: it carries trees from drafter to policy to target, and yields what was accepted."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError

from windfall.calibration import Calibrator
from windfall.clock import Stopwatch, now
from windfall.context import Context
from windfall.cost import ASSUMED, Costs
from windfall.drafters.base import Drafter
from windfall.files import is_unicode
from windfall.ledger import Ledger
from windfall.metrics import Stats
from windfall.policies.base import TreePolicy
from windfall.quiet import first_line
from windfall.records import Grow, InputError, Launch, SamplingParams, Step
from windfall.sequence import Sequence
from windfall.target import Target
from windfall.tree import MOST_NODES, DraftTree
from windfall.verify import walk

if TYPE_CHECKING:
    from windfall.resident.loop import Resident
    from windfall.resident.seat import SeatedTarget

WARM_UP = 24  # tokens
USUAL = 16  # tokens that a drafter has to take in at the most, if it drafted in the last cycle
Prompt = Any  # text, chat messages ({"role", "content"}), or token ids


@dataclass(frozen=True)
class Generation:
    """A finished text and how it came about."""

    text: str
    token_ids: list[int]
    finish_reason: str
    steps: list[Step]
    stats: Stats

    @classmethod
    def of(cls, steps: list[Step], times: list[float], prefill: float) -> Generation:
        """Fold Steps and the seconds after the start at which each came."""
        return cls(
            text="".join(step.text for step in steps),
            token_ids=[token for step in steps for token in step.tokens],
            finish_reason=(steps and steps[-1].finish) or "interrupted",
            steps=steps,
            stats=Stats.of(steps, times[-1] if times else 0.0, times[0] if times else 0.0, prefill),
        )


class Engine:
    """A target, a drafter and a policy. One generation (of one or several sequences) at a time."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        policy: TreePolicy,
        coupled: bool = True,
        launch: Launch | None = None,
    ):
        self.target, self.drafter, self.policy = target, drafter, policy
        self.coupled = coupled  # whether the drafter sees the noise of the draws, where there is any
        self.launch = launch or Launch()
        self.ledger = Ledger(ASSUMED, learns=False)
        self.calibrators: defaultdict[str, Calibrator] = defaultdict(Calibrator)  # by regime
        drafter.attach(target)
        self.prefill_seconds = 0.0
        self._made: tuple[Resident | None, str] | None = None
        self.fallback = ""  # why the last text did not stay on the device altogether

    def generate(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> Generation:
        """The whole text. Keywords are the fields of SamplingParams; `raw` leaves out the chat template."""
        return self.generate_batch([prompt], raw=raw, **sampling)[0]

    def stream(self, prompt: Prompt, *, raw: bool = False, **sampling: Any) -> Iterator[Step]:
        """A Step per cycle, as it happens."""
        prompts, params = [self.encode(prompt, raw)], [self.params(**sampling)]
        return (steps[0] for steps in self.run(prompts, params))

    def generate_batch(self, prompts: Many[Prompt], *, raw: bool = False, **sampling: Any) -> list[Generation]:
        """Several texts, decoded together; each is what `generate` would have given."""
        if isinstance(prompts, str | dict):
            raise InputError("generate_batch takes a list of prompts; for a single one there is generate")
        encoded, params = [self.encode(prompt, raw) for prompt in prompts], self.params(**sampling)
        if not encoded:
            return []
        return self.decode(encoded, [params] * len(encoded))

    def decode(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Generation]:
        """What these prompts of token ids, each with its own sampling, become; all are decoded together."""
        steps: list[list[Step]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        started = time.perf_counter()
        for cycle in self.run(prompts, params):
            now = time.perf_counter() - started
            for i, step in cycle.items():
                steps[i].append(step)
                times[i].append(now)
        return [Generation.of(*own, self.prefill_seconds) for own in zip(steps, times, strict=True)]

    def run(self, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[dict[int, Step]]:
        """Decode these prompts together: per cycle, the Step of every sequence that has not ended yet."""
        self.target.texts += 1
        text, started = self.target.texts, time.perf_counter()
        sequences = [
            Sequence(prompt, own, self.policy.fresh(), self.target, self.coupled)
            for prompt, own in zip(prompts, params, strict=True)
        ]
        target: Target | SeatedTarget = self.target
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
            steps = dict(zip(live, self._cycle(list(live.values()), target, drafter), strict=True))
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
        return self.ledger.costs

    @costs.setter
    def costs(self, given: Costs) -> None:
        self.ledger = Ledger(given, learns=False)

    @property
    def graphs(self) -> bool:
        """Whether single texts are to stay on the device."""
        asked = self.launch.graphs
        return self.target.device.type == "cuda" if asked is None else asked

    @property
    def resident(self) -> Resident | None:
        """What holds single texts on the device, where that is possible; else `unfit` says why not."""
        if self._made is None:
            from windfall.resident.loop import Resident

            none = (None, "graphs are off")
            self._made = Resident.of(self.target, self.drafter, self.launch) if self.graphs else none
        return self._made[0]

    @property
    def unfit(self) -> str:
        """Why no text can stay on the device; nothing if some can."""
        return self._made[1] if self.resident is None and self._made is not None else ""

    def _resident(self, sequences: list[Sequence]) -> Resident | None:
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
    def _cycle(self, live: list[Sequence], target: Target | SeatedTarget, drafter: Drafter) -> list[Step]:
        before = target.recordings
        ledger = self.ledger if self.ledger.learns and len(live) == 1 else None  # else passes are shared
        clock = Stopwatch()
        contexts = [s.context(self.costs, self.calibrators[s.regime], ledger) for s in live]
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
        draws = [s.draws(tree, score) for s, tree, score in zip(live, trees, scores, strict=True)]
        verdicts = [walk(tree, draw) for tree, draw in zip(trees, draws, strict=True)]
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
        if ledger is not None and not recorded:
            self._book(ledger, live[0], contexts[0].length, passes, len(trees[0]), verifying)
        for sequence, step in zip(live, steps, strict=True):
            sequence.policy.observe(step)
            self.calibrators[sequence.regime].observe(step)
        clock.lap("policy")
        return [replace(step, seconds=clock.split) for step in steps]

    def _book(
        self,
        ledger: Ledger,
        sequence: Sequence,
        length: int,
        passes: list[tuple[int, float]],
        rows: int,
        verifying: float,
    ) -> None:
        """Learn from a cycle what its passes take; where passes on the device were measured, these take longer."""
        slower = self.resident is not None
        if passes:
            ledger.drafted([0], passes[0][1], slower or length - sequence.drafted > USUAL)
            sequence.drafted = length
        for width, seconds in passes[1:]:
            ledger.drafted([width], seconds, slower)
        ledger.verified(rows, length, verifying, slower)

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Text, chat messages or token ids → token ids; text becomes a user's message unless `raw`."""
        ids = self.tokenize(prompt, raw) if _is_worded(prompt) else _as_ids(prompt)
        context, vocabulary = self.target.context, self.target.vocab_size
        if not ids:
            raise InputError("the prompt is empty")
        if context is not None and len(ids) >= context:
            raise InputError(f"the prompt has {len(ids)} tokens; {self.target.name} takes {context - 1} at most")
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
        if (size := len(tree) + len(nodes) * grow.k) > MOST_NODES:
            raise InputError(
                f"a draft tree has {MOST_NODES} nodes at the most; this pass would make {size}: choose fewer children"
            )
        self._expanded.update(nodes)
        self.passes += 1
        return grow if len(nodes) == grow.nodes.numel() else grow._replace(nodes=torch.tensor(nodes))

    def _possible(self, tree: DraftTree, grow: Grow) -> list[int]:
        deepest = self.context.room - 2  # a child at depth room - 1 and the target's own token fill the room
        nodes, depths = grow.nodes.tolist(), tree.arrays.depth[grow.nodes.numpy()].tolist()
        return [n for n, depth in zip(nodes, depths, strict=True) if depth <= deepest and n not in self._expanded]
