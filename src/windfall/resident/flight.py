"""Cycles under way: the host launches recorded work and reads, one cycle behind, what was accepted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from windfall.context import Context
from windfall.records import Split, Step, Verdict
from windfall.resident.cycle import SIGNALS, Cycle
from windfall.resident.drafting import Sprouting
from windfall.resident.judge import shape_of
from windfall.resident.recorder import Key
from windfall.resident.tree import told
from windfall.sequence import Sequence

SOMEWHERE = 64  # tokens behind which work is recorded; it is the same behind any number


class Begun(NamedTuple):
    """A cycle of which the first draft passes were launched."""

    drafting: list[Mark]  # beginnings and ends of its drafting
    passes: int
    asks: bool  # whether the plan decides about more
    columns: int  # of draft passes
    recordings: int  # before it


class Underway(NamedTuple):
    """A cycle that was launched."""

    place: int  # among the cycle's blocks, where it will be told
    passes: int
    drafting: list[Mark]  # beginnings and ends
    verified: Mark
    told: Mark
    deciding: float  # seconds that the device waited for decisions
    recorded: bool  # whether some of it was recorded, during which the device waited too


class Flight:
    """Launches cycles of one text, and lands them in order, one cycle later."""

    def __init__(self, cycle: Cycle, sprouting: Sprouting, sequence: Sequence):
        self.cycle, self.sprouting, self.sequence = cycle, sprouting, sequence
        self._key = (cycle.name, sprouting.key, shape_of(sequence.params))
        self._begun: Begun | None = None
        self._under_way: list[Underway] = []
        self._spare: list[Mark] = []
        self._passed: dict[int, Mark] = {}  # behind so many passes
        self._turn = 0
        self._kappa: float | None = None  # that the device has
        self._last: Mark | None = None
        self._deciding = 0.0  # seconds of this cycle
        self._drafted = 0  # passes of it, wanted or not

    def prepare(self, ctx: Context) -> None:
        """Record all that cycles of such a text can need, before it begins: in its midst each would wait for that."""
        cycle, plan, judge = self.cycle, self.cycle.plan, self.cycle.judge
        settled = plan.settled(ctx)
        sizes, openings = frozenset(plan.sizes()), frozenset(plan.openings(settled))
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
            self._open(min(count, plan.passes), settled is None, columns)
        for level in range(2, min(plan.passes, 1 + SIGNALS) + 1) if settled is None else ():
            cycle.rewind(SOMEWHERE)  # there is room for the passes of a single cycle
            self._pass(level, columns)

    def begin(self, ctx: Context) -> None:
        """The first draft passes of another cycle, which run while the host is busy with those before or with nothing.
        The time between them and the rest is nobody's."""
        self._begun = self._begin(ctx)
        self._begun.drafting.append(self._mark())

    def _begin(self, ctx: Context) -> Begun:
        cycle, plan, draft = self.cycle, self.cycle.plan, self.cycle.draft
        start, before, columns = self._mark(), cycle.judge.recorder.recordings, 0
        level, asks = 0, False
        self._deciding, self._drafted = 0.0, 0
        dice = self.sequence.dice
        if dice and dice.kappa != self._kappa:
            cycle.judge.dials.kappa.fill_(dice.kappa)
            self._kappa = dice.kappa
        if plan.passes:
            assert draft is not None
            columns = draft.columns
            plan.brief(cycle.terms_sent, ctx)
            settled = plan.settled(ctx)
            level, asks = settled or min(plan.least(), plan.passes), settled is None
            self._open(level, asks, columns)
        return Begun([start], level, asks, columns, before)

    def launch(self, ctx: Context) -> None:
        """Start another cycle behind those under way, or the rest of one that was begun."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.drafting.append(self._mark())
        drafting, passes, asks, columns, before = begun or self._begin(ctx)
        cycle, plan, judge = self.cycle, self.cycle.plan, self.cycle.judge
        if asks:
            passes = (self._draft_ahead if plan.foresees else self._draft_on)(passes, columns, ctx)
        drafting.append(self._mark())
        rows, levels = plan.verified(passes)
        cycle.limit(plan.places(levels) if levels < self._drafted else plan.capacity)
        judge.known += passes + 1
        self._verify(rows)
        verified, place = self._mark(), self._turn % len(cycle.blocks)
        self._turn += 1
        cycle.told.fetch(cycle.blocks[place])
        recorded = judge.recorder.recordings > before
        self._under_way.append(Underway(place, passes, drafting, verified, self._mark(), self._deciding, recorded))

    def _open(self, count: int, ask: bool, columns: int) -> None:
        """The first draft passes, in one piece; the plan is asked behind them, or not at all."""
        self._do(("draft", count, ask, columns), lambda: self._passes(count, ask))
        self._drafted = count

    def _verify(self, rows: int) -> None:
        cycle, columns = self.cycle, self.cycle.judge.columns(rows)
        self._do(("verify", rows, columns), lambda: cycle.verify(rows, columns, self.sequence.params))

    def _passes(self, count: int, ask: bool) -> None:
        """Draft passes one after the other, without asking."""
        self.cycle.open(self.sprouting)
        for level in range(1, count):
            if ask and self.cycle.plan.foresees and level == count - 1:
                self.cycle.show(level)
            self.cycle.expand(self.sprouting)
        if ask:
            self.cycle.show(count)

    def _draft_ahead(self, level: int, columns: int, ctx: Context) -> int:
        """Further passes, each decided on while the one before it runs; returns the number of all."""
        plan, done, settled = self.cycle.plan, self._behind(level), level - 1
        while level < plan.passes:
            following = self._pass(level + 1, columns)
            if settled:  # it was not asked, but what it brought is what the next one is measured by
                self._goes_on(settled, done, True, ctx)
                settled = 0
            if not self._goes_on(level, done, True, ctx):
                return level + 1
            level, done = level + 1, following
        return level

    def _draft_on(self, level: int, columns: int, ctx: Context) -> int:
        """Further passes for as long as the plan wants them; returns the number of all. One that will probably be
        wanted is launched before the plan is asked; if it was not, what it drafted is left out."""
        plan, habit = self.cycle.plan, self.cycle.habit
        habit.weigh(ctx.costs.draft(plan.width))
        done = self._behind(level)
        while True:
            early = level < plan.passes and habit.likely(level)
            following = self._pass(level + 1, columns) if early else None
            if not self._goes_on(level, done, early, ctx):
                return level
            level += 1
            done = following or self._pass(level, columns)

    def _pass(self, level: int, columns: int) -> Mark:
        def work() -> None:
            self.cycle.expand(self.sprouting)
            self.cycle.show(level)

        self._do(("pass", level % SIGNALS, columns), work)
        self._drafted = level
        return self._behind(level)

    def _behind(self, level: int) -> Mark:
        """The mark behind so many passes of this cycle."""
        if level not in self._passed:
            self._passed[level] = Mark(self.cycle.judge.device)
        return self._passed[level].set()

    def _mark(self) -> Mark:
        return (self._spare.pop() if self._spare else Mark(self.cycle.judge.device)).set()

    def _goes_on(self, level: int, done: Mark, early: bool, ctx: Context) -> bool:
        """The plan's decision after this many passes, the last of which ends with the mark."""
        plan = self.cycle.plan
        if not plan.asks(level):
            return level < plan.passes
        done.wait()
        started = time.perf_counter()
        found = plan.goes_on(level, self.cycle.seen[level % SIGNALS], ctx)
        if not early:
            self._deciding += time.perf_counter() - started
        if level < plan.passes:
            self.cycle.habit.note(level, found)
        return found

    def _do(self, key: Key, work: Callable[[], None]) -> None:
        self.cycle.judge.recorder.run((*key, *self._key), work)

    def land(self) -> Step:
        """Wait for the oldest cycle under way, and make its Step."""
        sequence, cycle = self.sequence, self._under_way.pop(0)
        cycle.told.wait()
        places = self.cycle.plan.places(cycle.passes)
        drafted, kept, path, bonus = told(self.cycle.tales[cycle.place], sequence.tokens[-1], places)
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
        verify, total = marks[-1].until(cycle.verified), last.until(cycle.told)
        self._spare += [*marks, cycle.verified, *([self._last] if self._last else [])]
        self._last = cycle.told
        policy = min(cycle.deciding, draft)
        return Split(draft - policy, verify, policy, other=max(total - draft - verify, 0.0))


class Mark:
    """A moment in the order of the device's work."""

    def __init__(self, device: torch.device):
        self._device, self._time = device, 0.0
        self._event: Any = None
        if device.type == "cuda":  # making one takes longer than setting it
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def set(self) -> Mark:
        """It is now, and no longer when it was before."""
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
        return self

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def until(self, other: Mark) -> float:
        """Seconds."""
        if self._event is None or other._event is None:
            return other._time - self._time
        return float(self._event.elapsed_time(other._event)) / 1000
