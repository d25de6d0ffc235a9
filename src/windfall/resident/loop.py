"""The cycle on the device: the host launches recorded work and reads, one cycle behind, what was accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from windfall.context import Context
from windfall.drafters.base import Drafter
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.kernels.choose import choose
from windfall.kernels.grow import grow
from windfall.records import Launch, SamplingParams, Split, Step, Verdict
from windfall.resident.drafting import Draft, HeadDraft, ModelDraft, Sprouting, read
from windfall.resident.forward import Pass, Unfit
from windfall.resident.judge import EXACT, Judge, fitting, shape_of
from windfall.resident.parcel import Parcel
from windfall.resident.plans import Plan, plan_of
from windfall.resident.recorder import Recorder
from windfall.resident.seat import PENDING, STAGED, SeatedDrafter, SeatedTarget
from windfall.resident.seat import WIDTHS as PASSES
from windfall.resident.tree import ahead, plant, terms, told
from windfall.sequence import Sequence
from windfall.target import Target

if TYPE_CHECKING:
    from windfall.engine import Engine

WIDEST = PASSES[-1]


class Cycle:
    """One plan with its buffers: the pieces of work that a cycle launches."""

    def __init__(self, plan: Plan, drafter: Drafter, judge: Judge):
        self.plan, self.judge = plan, judge
        device, staged = judge.device, max(plan.width * plan.passes, 1)
        self.tree, self.told = plant(device, plan.nodes + plan.width * plan.k, plan.passes + 1)
        self.blocks = [self.told.block() for _ in range(3)]  # where the host reads it, cycle by cycle
        self.terms, self.terms_sent = terms(device)
        self.signal = Parcel(device, promise=(torch.float32, (4,)))
        self.levels = torch.zeros(1, dtype=torch.long, device=device)
        self.draft = draft_of(drafter, judge, plan.passes + 1, staged) if plan.passes else None
        length = judge.length if self.draft is None else self.draft.length
        self.ahead = ahead(device, plan.width, staged, length, self.signal.device["promise"])
        self._root = torch.zeros(1, dtype=torch.long, device=device)

    def start(self, prompt: list[int]) -> None:
        """Read a prompt, and begin with its last token as the root."""
        read(prompt, self.judge, self.draft)
        self.tree.tokens[:1].fill_(prompt[-1])
        self.tree.count.fill_(1)
        self.ahead.staged.zero_()
        self.ahead.expanded.fill_(-1)

    def open(self, sprouting: Sprouting) -> None:
        """The first draft pass: the root's children, and which nodes come next."""
        assert self.draft is not None
        logits, positions = self.draft.open(self.draft.pending)
        self._sprout(self._root, logits, positions, sprouting)

    def expand(self, sprouting: Sprouting) -> None:
        """A further draft pass."""
        assert self.draft is not None
        rows = self.ahead
        given = Pass(rows.tokens, rows.positions, rows.slots, rows.mask, self.draft.length)
        logits = self.draft.grow(given, rows.above, rows.here)
        self._sprout(rows.nodes, logits, rows.positions + self.draft.lag, sprouting)

    def _sprout(self, nodes: Tensor, logits: Tensor, positions: Tensor, sprouting: Sprouting) -> None:
        assert self.draft is not None
        values, tokens = sprouting.children(logits, positions, self.plan.k, self.draft.vocabulary)
        grow(self.tree, nodes, tokens, values, self.ahead, self.plan.rule, self.terms)

    def verify(self, rows: int, columns: int, params: SamplingParams) -> None:
        """Choose the rows, judge them, and plant the next tree."""
        judge, there = self.judge, self.judge.rows.device
        kept = self.told.device["kept"][:rows]
        tokens, parents, depth = (there[name][:rows] for name in ("tokens", "parents", "depth"))
        mask = there["mask"][:rows, :rows]
        choose(self.tree, rows, kept, tokens, parents, depth, mask, there["count"], self.levels)
        judge.score(rows, columns)
        judge.settle(rows, self.plan.passes + 1, params, self)
        self.told.device["path"][:rows].copy_(judge.path[:rows])


def on_host(drafter: Drafter) -> str:
    """Why this drafter cannot work on fixed buffers; nothing if it can."""
    if isinstance(drafter, LMDrafter):
        try:
            fitting(drafter._decoder.model)
        except Unfit as reason:
            return f"its drafter works on the host: {reason}"
        return ""
    return "" if isinstance(drafter, FeatureHeadDrafter) else "its drafter works on the host"


def draft_of(drafter: Drafter, judge: Judge, pending: int, staged: int) -> Draft:
    """This drafter on fixed buffers."""
    if isinstance(drafter, FeatureHeadDrafter):
        return HeadDraft(drafter._head, judge, pending, staged)
    assert isinstance(drafter, LMDrafter)
    return ModelDraft(drafter._decoder, drafter._vocabulary, judge, pending, staged)


class Resident:
    """Generates one sequence at a time on the device, for the policies, drafters and ways of sampling it knows."""

    def __init__(self, target: Target, drafter: Drafter, launch: Launch):
        self.target, self.drafter = target, drafter
        self.judge = Judge(target.model, drafter.taps, Recorder(target.device), launch)
        self.drafts_on_host = on_host(drafter)  # why the drafter cannot work on the device
        self.cycles: dict[tuple[object, ...], Cycle] = {}
        self._seats: tuple[int, SeatedTarget, Drafter] | None = None

    def refuses(self, sequence: Sequence) -> str:
        """Why this text cannot be generated here; nothing if it can."""
        plan, params = plan_of(sequence.policy), sequence.params
        if plan is None or (self.judge.exact and plan.rows > EXACT):
            return "its policy decides on the host"
        if plan.passes and self.drafts_on_host:
            return self.drafts_on_host
        if params.reads_prefix or params.logit_bias:
            return "its sampling looks at the text so far"
        return ""

    def seats(self, sequence: Sequence) -> tuple[SeatedTarget, Drafter]:
        """Target and drafter on fixed buffers for the engine's own cycle, where a policy decides on the host."""
        judge, drafter = self.judge, self.drafter
        self._reserve(sequence, STAGED + WIDEST)
        if self._seats is None or self._seats[0] != judge.capacity:
            seated: Drafter = drafter
            if not self.drafts_on_host:
                longest = None
                if isinstance(drafter, FeatureHeadDrafter):
                    longest = drafter._head.config.layer.max_position_embeddings
                seated = SeatedDrafter(draft_of(drafter, judge, PENDING, STAGED + WIDEST), longest)
            self._seats = (judge.capacity, SeatedTarget(self.target, judge), seated)
        _, target, seated = self._seats
        if isinstance(seated, SeatedDrafter):
            seated.params = sequence.params
        return target, seated

    def _reserve(self, sequence: Sequence, more: int) -> None:
        self.judge.reserve(min(sequence.end, len(sequence.tokens) + sequence.params.max_new_tokens) + more)

    @torch.inference_mode()
    def run(self, engine: Engine, sequence: Sequence) -> Iterator[Step]:
        """The Steps of this text."""
        plan = plan_of(sequence.policy)
        assert plan is not None
        started = time.perf_counter()
        cycle = self._start(plan, sequence)
        engine.prefill_seconds = time.perf_counter() - started
        flight = Flight(cycle, Sprouting(sequence.params, engine.coupled, self.judge.dials), sequence)
        context = self._context(engine, sequence)
        flight.launch(context)
        while True:
            flight.launch(context)
            step = flight.land()
            sequence.policy.observe(step)
            engine.calibrators[sequence.regime].observe(step)
            context = self._context(engine, sequence)
            plan.landed(step, context)
            yield step
            if step.finish:
                return

    def _context(self, engine: Engine, sequence: Sequence) -> Context:
        context = sequence.context(engine.costs, engine.calibrators[sequence.regime])
        if sequence.dice:
            self.judge.dials.kappa.fill_(sequence.dice.kappa)
        return context

    def _start(self, plan: Plan, sequence: Sequence) -> Cycle:
        """Prefill, and hand the prompt over to the fixed buffers."""
        judge, prompt = self.judge, sequence.tokens
        self._reserve(sequence, 3 * (plan.passes + 2) + plan.width * plan.passes)
        judge.sample(sequence.params)
        key = (plan.key, judge.capacity)
        if key not in self.cycles:
            self.cycles = {kept: cycle for kept, cycle in self.cycles.items() if kept[1] == judge.capacity}
            self.cycles[key] = Cycle(plan, self.drafter, judge)
        cycle = self.cycles[key]
        cycle.plan = plan
        cycle.start(prompt)
        return cycle


def settle(target: Target, drafter: Drafter, launch: Launch) -> tuple[Resident | None, str]:
    """A Resident for this pair, or why there is none."""
    try:
        return Resident(target, drafter, launch), ""
    except Unfit as reason:
        return None, str(reason)


class Flight:
    """Cycles under way: launched by the host, landed in order, one cycle later."""

    def __init__(self, cycle: Cycle, sprouting: Sprouting, sequence: Sequence):
        self.cycle, self.sprouting, self.sequence = cycle, sprouting, sequence
        self._key = (cycle.plan.key, sprouting.key, shape_of(sequence.params), cycle.judge.capacity)
        self._under_way: list[tuple[Tensor, int, list[Mark]]] = []
        self._turn = 0
        self._last: Mark | None = None

    def launch(self, ctx: Context) -> None:
        """Start another cycle behind those under way."""
        cycle, plan, judge = self.cycle, self.cycle.plan, self.cycle.judge
        marks = [Mark(judge.device)]
        passes = self._draft(ctx) if plan.passes else 0
        marks.append(Mark(judge.device))
        rows, levels = plan.verified(passes)
        if plan.passes:
            cycle.levels.fill_(levels)
        judge.known += passes + 1
        columns = judge.columns(rows)
        self._do(("verify", rows, columns), lambda: cycle.verify(rows, columns, self.sequence.params))
        marks.append(Mark(judge.device))
        block = cycle.blocks[self._turn % len(cycle.blocks)]
        self._turn += 1
        cycle.told.fetch(block)
        marks.append(Mark(judge.device))
        self._under_way.append((block, passes, marks))

    def _draft(self, ctx: Context) -> int:
        """Grow the tree; returns the number of passes."""
        plan, draft = self.cycle.plan, self.cycle.draft
        assert draft is not None
        columns = draft.columns
        plan.brief(self.cycle.terms_sent, ctx)
        settled = plan.settled(ctx)
        level = settled or min(plan.least(), plan.passes)
        ask = settled is None
        self._do(("draft", level, ask, columns), lambda: self._passes(level, ask))
        while ask and plan.goes_on(level, self._promise(), ctx):
            self._do(("pass", columns), self._pass)
            level += 1
        return level

    def _passes(self, count: int, ask: bool) -> None:
        """Draft passes one after the other, without asking."""
        self.cycle.open(self.sprouting)
        for _ in range(1, count):
            self.cycle.expand(self.sprouting)
        if ask:
            self.cycle.signal.fetch()

    def _pass(self) -> None:
        self.cycle.expand(self.sprouting)
        self.cycle.signal.fetch()

    def _promise(self) -> list[float]:
        self.cycle.judge.recorder.wait()
        found: list[float] = self.cycle.signal.host["promise"].tolist()
        return found

    def _do(self, key: tuple[object, ...], work: Callable[[], None]) -> None:
        self.cycle.judge.recorder.run((*key, *self._key), work)

    def land(self) -> Step:
        """Wait for the oldest cycle under way, and make its Step."""
        sequence, (block, passes, marks) = self.sequence, self._under_way.pop(0)
        marks[-1].wait()
        drafted, kept, path, bonus = told(self.cycle.told.read(block), sequence.tokens[-1])
        split = self._split(marks)
        tree = drafted.select(kept)
        tokens, text = sequence.accept(tree, Verdict(path, bonus))
        self.cycle.judge.known = len(sequence.tokens) + sum(level + 1 for _, level, _ in self._under_way)
        return Step(tokens, text, tree, path, drafted, kept, passes, split, sequence.finish)

    def _split(self, marks: list[Mark]) -> Split:
        """Where the time since the last cycle's end went."""
        draft, verify = marks[0].until(marks[1]), marks[1].until(marks[2])
        total = (self._last or marks[0]).until(marks[3])
        self._last = marks[3]
        return Split(draft=draft, verify=verify, other=max(total - draft - verify, 0.0))


class Mark:
    """A moment in the order of the device's work."""

    def __init__(self, device: torch.device):
        self._event: Any = None
        self._time = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def until(self, other: Mark) -> float:
        """Seconds."""
        if self._event is None or other._event is None:
            return other._time - self._time
        return float(self._event.elapsed_time(other._event)) / 1000
