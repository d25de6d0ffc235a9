"""Cycles under way: the host launches recorded work and reads, one cycle behind, what was accepted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from windfall.core.types import Split, Step, Verdict
from windfall.engine.gpu.cycle import Cycle
from windfall.engine.gpu.drafters import Sprouting
from windfall.engine.gpu.graphs import Key
from windfall.engine.gpu.target import shape_of
from windfall.engine.gpu.tree import told
from windfall.engine.sequence import Sequence
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Opening

SOMEWHERE = 64  # tokens behind which work is recorded; it is the same behind any number


class Begun(NamedTuple):
    """A cycle of which the first draft passes were launched."""

    start: Mark
    opened: Mark | None  # behind these passes, where others do not follow at once
    opening: Opening
    columns: int  # of draft passes
    recordings: int  # before it


class Underway(NamedTuple):
    """A cycle that was launched."""

    number: int  # under which it will be told
    passes: int
    places: int  # of the tree that these passes drafted
    drafting: list[Mark]  # beginnings and ends
    end: Mark
    deciding: float  # seconds that the device waited for decisions
    recorded: bool  # whether some of it was recorded, during which the device waited too


class Pipeline:
    """Launches cycles of one text, and lands them in order, one cycle later."""

    def __init__(self, cycle: Cycle, sprouting: Sprouting, sequence: Sequence):
        self.cycle, self.sprouting, self.sequence = cycle, sprouting, sequence
        self._key = (cycle.name, sprouting.key, shape_of(sequence.params))
        self._begun: Begun | None = None
        self._under_way: list[Underway] = []
        self._numbers: dict[int, int] = {}  # under which so many passes are told
        self._spare: list[Mark] = []
        self._stream: Any = stream_of(cycle.judge.device)
        self._asked: Mark | None = None  # where reading the prompt begins
        self.prefill_seconds = 0.0  # that it took
        self._kappa: float | None = None  # that the device has
        self._newest: Mark | None = None  # the end of what was launched last
        self._last: Mark | None = None  # and of what landed last
        self.away = False  # whether the stream may have been used for something else since the last launch
        self._deciding = 0.0  # seconds of this cycle
        self._decision = Decision(False, 1)  # the last one of this cycle
        self._block = 0  # where the last report lies
        self._drafted = 0  # passes of it, wanted or not

    def prepare(self, ctx: Context) -> None:
        """Record all that cycles of such a text can need, before it begins: in its midst each would wait for that."""
        cycle, plan, judge = self.cycle, self.cycle.plan, self.cycle.judge
        opening = plan.begin(ctx)
        sizes = frozenset(self._size(rows) for rows in plan.sizes or {opening.rows})
        openings = frozenset(plan.openings or {opening.passes})
        kind = (*self._key, sizes, openings)  # plans that share their buffers may differ in these
        if kind in cycle.prepared or not judge.recorder.enabled or judge.forward.bucketed:
            return
        cycle.prepared.add(kind)
        for rows in sizes:
            cycle.rewind(SOMEWHERE)
            self._verify(rows)
        if cycle.draft is None:
            return
        columns = cycle.draft.columns
        for count in openings:
            cycle.rewind(SOMEWHERE)
            self._open(min(count, plan.passes), columns)
        if plan.decide is not None and plan.passes > 1:
            cycle.rewind(SOMEWHERE)  # there is room for the passes of a single cycle
            self._pass(2, columns)

    def start(self) -> None:
        """Read the prompt."""
        self._asked = self._mark()
        self.cycle.start(self.sequence.tokens)

    def begin(self, ctx: Context) -> None:
        """The first draft passes of another cycle, which run while the host is busy with those before or with nothing.
        The time between them and the rest is nobody's."""
        self._begun = self._begin(self._behind(), ctx)._replace(opened=self._mark())

    def _begin(self, start: Mark, ctx: Context) -> Begun:
        cycle, plan, draft = self.cycle, self.cycle.plan, self.cycle.draft
        before, columns = cycle.judge.recorder.recordings, 0
        opening = plan.begin(ctx)
        self._deciding, self._drafted = 0.0, 0
        self._decision = Decision(False, opening.rows)
        dice = self.sequence.dice
        if dice and dice.kappa != self._kappa:
            cycle.judge.dials.kappa.fill_(dice.kappa)
            self._kappa = dice.kappa
        if plan.passes:
            assert draft is not None
            columns = draft.columns
            self.sequence.policy.start_cycle(ctx)
            cycle.send_terms(ctx)
            self._open(opening.passes, columns)
        return Begun(start, None, opening, columns, before)

    def launch(self, ctx: Context) -> None:
        """Start another cycle behind those under way, or the rest of one that was begun."""
        cycle, plan, judge = self.cycle, self.cycle.plan, self.cycle.judge
        self._stream = stream_of(judge.device)
        begun, self._begun = self._begun or self._begin(self._behind(), ctx), None
        start, opened, (passes, _), columns, before = begun
        drafting = [start]
        if opened is not None and (self.away or opened.passed()):
            drafting += [opened, self._mark()]
        elif opened is not None:
            self._spare.append(opened)
        if plan.decide is not None:
            passes = (self._draft_ahead if plan.lookahead else self._draft_on)(passes, columns, ctx)
        drafting.append(self._mark() if passes else start)
        _, rows, levels = self._decision
        cycle.limit(self._places(passes if levels is None else levels))
        judge.known += passes + 1
        number, self._newest = self._verify(self._size(rows)), self._mark()
        self.away, recorded = False, judge.recorder.recordings > before
        places = self._places(passes)
        self._under_way.append(Underway(number, passes, places, drafting, self._newest, self._deciding, recorded))

    def _size(self, rows: int) -> int:
        """Rows of the verify pass: the next of the plan's sizes."""
        plan = self.cycle.plan
        return min(min((size for size in plan.sizes if size >= rows), default=rows), plan.rows)

    def _places(self, levels: int) -> int:
        """Places of the tree that so many passes drafted."""
        if levels >= self._drafted:
            return self.cycle.capacity
        if self.cycle.rule.selective:  # nodes were moved together
            return int(self.cycle.views[self._block].summary(levels).nodes) if levels else 1
        return self.cycle.verified_places(levels)

    def _open(self, count: int, columns: int) -> None:
        """The first draft passes, in one piece; if the plan decides, it does so after them."""
        asks = self.cycle.plan.decide is not None
        if asks:
            self._expect(count)
        self._do(("draft", count, asks, columns), lambda: self._passes(count, asks))
        self._drafted = count

    def _verify(self, rows: int) -> int:
        cycle, columns = self.cycle, self.cycle.judge.columns(rows)
        number = cycle.tales.ask()
        params, noise = self.sequence.params, self.sprouting.noise
        self._do(("verify", rows, columns), lambda: cycle.verify(rows, columns, params, noise))
        return number

    def _passes(self, count: int, asks: bool) -> None:
        """Draft passes one after the other, and a report after the last if the plan decides."""
        for level in range(1, count + 1):
            (self.cycle.open if level == 1 else self.cycle.expand)(self.sprouting)
        if asks:
            self.cycle.show()

    def _draft_ahead(self, level: int, columns: int, ctx: Context) -> int:
        """Further passes, each decided on while the one before it runs; returns the number of all."""
        plan = self.cycle.plan
        while level < plan.passes:
            self._pass(level + 1, columns)
            if not self._goes_on(level, True, ctx):
                return level + 1
            level += 1
        return level

    def _draft_on(self, level: int, columns: int, ctx: Context) -> int:
        """Further passes for as long as the plan wants them; returns the number of all. One that will probably be
        wanted is launched before the plan is asked; if it was not, what it drafted is left out."""
        plan, habit = self.cycle.plan, self.cycle.habit
        habit.weigh(ctx.costs.draft(plan.width))
        while True:
            early = level < plan.passes and habit.likely(level)
            if early:
                self._pass(level + 1, columns)
            if not self._goes_on(level, early, ctx):
                return level
            level += 1
            if not early:
                self._pass(level, columns)

    def _pass(self, level: int, columns: int) -> None:
        def work() -> None:
            self.cycle.expand(self.sprouting)
            self.cycle.show()

        self._expect(level)
        self._do(("pass", columns), work)
        self._drafted = level

    def _expect(self, level: int) -> None:
        """So many passes will be told next."""
        assert self.cycle.signals is not None
        self._numbers[level] = self.cycle.signals.ask()

    def _goes_on(self, level: int, early: bool, ctx: Context) -> bool:
        """The plan's decision after this many passes."""
        plan, signals = self.cycle.plan, self.cycle.signals
        if level not in plan.asked:
            self._decision = Decision(level < plan.passes, plan.rows)
            return self._decision.go_on
        assert signals is not None
        self._block = signals.wait(self._numbers[level])
        started = time.perf_counter()
        self._decision = plan.decision(level, self.cycle.views[self._block], ctx)
        if not early:
            self._deciding += time.perf_counter() - started
        if level < plan.passes:
            self.cycle.habit.note(level, self._decision.go_on)
        return self._decision.go_on

    def _do(self, key: Key, work: Callable[[], None]) -> None:
        self.cycle.judge.recorder.run((*key, *self._key), work)

    def _behind(self) -> Mark:
        """Where what is launched next begins: at the end of what was launched last, unless something may have come
        between, if only that there was nothing to do. A mark of its own would hold the device up a little."""
        return self._mark() if self.away or self._newest is None or self._newest.passed() else self._newest

    def _mark(self) -> Mark:
        return (self._spare.pop() if self._spare else Mark(self.cycle.judge.device)).set(self._stream)

    def land(self) -> Step:
        """Wait for the oldest cycle under way, and make its Step."""
        sequence, cycle, tales = self.sequence, self._under_way.pop(0), self.cycle.tales
        cycle.end.wait()
        told_arrays = tales.arrays[tales.wait(cycle.number)]
        drafted, kept, path, bonus = told(told_arrays, sequence.tokens[-1], cycle.places)
        split = self._split(cycle)
        tree = drafted.select(kept)
        tokens, text = sequence.accept(tree, Verdict(path, bonus))
        self.cycle.judge.known = len(sequence.tokens) + sum(other.passes + 1 for other in self._under_way)
        finish, recorded = sequence.finish, cycle.recorded
        return Step(tokens, text, tree, path, drafted, kept, cycle.passes, split, finish, recorded)

    def _split(self, cycle: Underway) -> Split:
        """Where the time since the last cycle's end went."""
        marks, last = cycle.drafting, self._last or cycle.drafting[0]
        draft = sum(start.until(end) for start, end in zip(marks[::2], marks[1::2], strict=True))
        verify, total = marks[-1].until(cycle.end), last.until(cycle.end)
        if self._last is None and self._asked is not None:
            self.prefill_seconds = self._asked.until(last)
        self._spare += {*marks, last}
        self._last = cycle.end
        policy = min(cycle.deciding, draft)
        return Split(draft - policy, verify, policy, other=max(total - draft - verify, 0.0))


class Mark:
    """A moment in the order of the device's work."""

    def __init__(self, device: torch.device):
        self._time = 0.0
        self._event: Any = None
        if device.type == "cuda":  # making one takes longer than setting it
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def set(self, stream: Any) -> Mark:
        """It is now, and no longer when it was before."""
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record(stream)
        return self

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def until(self, other: Mark) -> float:
        """Seconds."""
        if self._event is None or other._event is None:
            return other._time - self._time
        return 0.0 if self is other else float(self._event.elapsed_time(other._event)) / 1000


def stream_of(device: torch.device) -> Any:
    """Where work on this device is launched just now; asking takes longer than setting a mark."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
