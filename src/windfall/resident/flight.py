"""Cycles under way: the host launches recorded work and reads, one cycle behind, what was accepted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from windfall.context import Context
from windfall.records import Split, Step, Verdict
from windfall.resident.cycle import Cycle
from windfall.resident.drafting import Sprouting
from windfall.resident.judge import shape_of
from windfall.resident.recorder import Key
from windfall.resident.tree import told
from windfall.sequence import Sequence


class Flight:
    """Launches cycles of one text, and lands them in order, one cycle later."""

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

    def _do(self, key: Key, work: Callable[[], None]) -> None:
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
