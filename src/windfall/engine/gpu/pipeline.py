"""Cycles under way: the host launches recorded work and reads, one cycle behind, what was accepted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from windfall.core.types import Split, Step, Verdict
from windfall.engine.gpu.cycle import Cycle
from windfall.engine.gpu.drafters import ChildSampler
from windfall.engine.gpu.graphs import Key
from windfall.engine.gpu.target import sampling_key
from windfall.engine.gpu.tree import read_results
from windfall.engine.sequence import Sequence
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Opening

CAPTURE_LENGTH_TOKENS = 64  # tokens behind which work is recorded; it is the same behind any number


class StartedCycle(NamedTuple):
    """A cycle of which the first draft passes were launched."""

    start: DeviceEvent
    opened: DeviceEvent | None  # behind these passes, where others do not follow at once
    opening: Opening
    columns: int  # of draft passes
    captures: int  # before it


class LaunchedCycle(NamedTuple):
    """A cycle that was launched."""

    number: int  # under which it will be told
    passes: int
    places: int  # of the tree that these passes drafted
    drafting: list[DeviceEvent]  # beginnings and ends
    end: DeviceEvent
    decision_seconds: float  # seconds that the device waited for decisions
    recorded: bool  # whether some of it was recorded, during which the device waited too


class Pipeline:
    """Launches cycles of one text, and lands them in order, one cycle later."""

    def __init__(self, cycle: Cycle, sampler: ChildSampler, sequence: Sequence):
        self.cycle, self.sampler, self.sequence = cycle, sampler, sequence
        self._key = (cycle.buffers_id, sampler.key, sampling_key(sequence.params))
        self._started: StartedCycle | None = None
        self._launched: list[LaunchedCycle] = []
        self._report_numbers: dict[int, int] = {}  # under which so many passes are told
        self._spare_events: list[DeviceEvent] = []
        self._stream: Any = current_stream(cycle.gpu_target.device)
        self._prefill_start: DeviceEvent | None = None  # where reading the prompt begins
        self.prefill_seconds = 0.0  # that it took
        self._kappa: float | None = None  # that the device has
        self._last_launched: DeviceEvent | None = None  # the end of what was launched last
        self._last_collected: DeviceEvent | None = None  # and of what landed last
        self.stream_used = False  # whether the stream may have been used for something else since the last launch
        self._decision_seconds = 0.0  # seconds of this cycle
        self._decision = Decision(False, 1)  # the last one of this cycle
        self._report_block = 0  # where the last report lies
        self._launched_passes = 0  # passes of it, wanted or not

    def capture_graphs(self, ctx: Context) -> None:
        """Record all that cycles of such a text can need, before it begins: in its midst each would wait for that."""
        cycle, plan, gpu_target = self.cycle, self.cycle.plan, self.cycle.gpu_target
        opening = plan.begin(ctx)
        sizes = frozenset(self._verify_size(rows) for rows in plan.sizes or {opening.rows})
        openings = frozenset(plan.openings or {opening.passes})
        kind = (*self._key, sizes, openings)  # plans that share their buffers may differ in these
        if kind in cycle.captured_kinds or not gpu_target.graph_cache.enabled or gpu_target.forward.bucketed:
            return
        cycle.captured_kinds.add(kind)
        for rows in sizes:
            cycle.set_length(CAPTURE_LENGTH_TOKENS)
            self._launch_verify(rows)
        if cycle.draft is None:
            return
        columns = cycle.draft.columns
        for count in openings:
            cycle.set_length(CAPTURE_LENGTH_TOKENS)
            self._launch_first_passes(min(count, plan.passes), columns)
        if plan.decide is not None and plan.passes > 1:
            cycle.set_length(CAPTURE_LENGTH_TOKENS)  # there is room for the passes of a single cycle
            self._launch_pass(2, columns)

    def prefill(self) -> None:
        """Read the prompt."""
        self._prefill_start = self._event()
        self.cycle.start(self.sequence.tokens)

    def launch_first_passes(self, ctx: Context) -> None:
        """The first draft passes of another cycle, which run while the host is busy with those before or with nothing.
        The time between them and the rest is nobody's."""
        self._started = self._start_cycle(self._start_event(), ctx)._replace(opened=self._event())

    def _start_cycle(self, start: DeviceEvent, ctx: Context) -> StartedCycle:
        cycle, plan, draft = self.cycle, self.cycle.plan, self.cycle.draft
        before, columns = cycle.gpu_target.graph_cache.captures, 0
        opening = plan.begin(ctx)
        self._decision_seconds, self._launched_passes = 0.0, 0
        self._decision = Decision(False, opening.rows)
        dice = self.sequence.dice
        if dice and dice.kappa != self._kappa:
            cycle.gpu_target.sampling.kappa.fill_(dice.kappa)
            self._kappa = dice.kappa
        if plan.passes:
            assert draft is not None
            columns = draft.columns
            self.sequence.policy.start_cycle(ctx)
            cycle.send_terms(ctx)
            self._launch_first_passes(opening.passes, columns)
        return StartedCycle(start, None, opening, columns, before)

    def launch(self, ctx: Context) -> None:
        """Start another cycle behind those under way, or the rest of one that was started_cycle."""
        cycle, plan, gpu_target = self.cycle, self.cycle.plan, self.cycle.gpu_target
        self._stream = current_stream(gpu_target.device)
        started_cycle, self._started = self._started or self._start_cycle(self._start_event(), ctx), None
        start, opened, (passes, _), columns, before = started_cycle
        drafting = [start]
        if opened is not None and (self.stream_used or opened.done()):
            drafting += [opened, self._event()]
        elif opened is not None:
            self._spare_events.append(opened)
        if plan.decide is not None:
            passes = (self._draft_with_lookahead if plan.lookahead else self._draft_while_wanted)(passes, columns, ctx)
        drafting.append(self._event() if passes else start)
        _, rows, levels = self._decision
        cycle.limit_verified(self._places_after(passes if levels is None else levels))
        gpu_target.length_bound += passes + 1
        number, self._last_launched = self._launch_verify(self._verify_size(rows)), self._event()
        self.stream_used, recorded = False, gpu_target.graph_cache.captures > before
        places = self._places_after(passes)
        self._launched.append(
            LaunchedCycle(number, passes, places, drafting, self._last_launched, self._decision_seconds, recorded)
        )

    def _verify_size(self, rows: int) -> int:
        """Rows of the verify pass: the next of the plan's sizes."""
        plan = self.cycle.plan
        return min(min((size for size in plan.sizes if size >= rows), default=rows), plan.rows)

    def _places_after(self, levels: int) -> int:
        """Places of the tree that so many passes drafted."""
        if levels >= self._launched_passes:
            return self.cycle.capacity
        if self.cycle.rule.selective:  # nodes were moved together
            return int(self.cycle.views[self._report_block].summary(levels).nodes) if levels else 1
        return self.cycle.places_after(levels)

    def _launch_first_passes(self, count: int, columns: int) -> None:
        """The first draft passes, in one piece; if the plan decides, it does so after them."""
        asks = self.cycle.plan.decide is not None
        if asks:
            self._expect_report(count)
        self._run(("draft", count, asks, columns), lambda: self._run_passes(count, asks))
        self._launched_passes = count

    def _launch_verify(self, rows: int) -> int:
        cycle, columns = self.cycle, self.cycle.gpu_target.columns(rows)
        number = cycle.results.expect()
        params, noise = self.sequence.params, self.sampler.noise
        self._run(("verify", rows, columns), lambda: cycle.verify(rows, columns, params, noise))
        return number

    def _run_passes(self, count: int, asks: bool) -> None:
        """Draft passes one after the other, and a report after the last if the plan decides."""
        for level in range(1, count + 1):
            (self.cycle.first_pass if level == 1 else self.cycle.next_pass)(self.sampler)
        if asks:
            self.cycle.publish_report()

    def _draft_with_lookahead(self, level: int, columns: int, ctx: Context) -> int:
        """Further passes, each decided on while the one before it runs; returns the number of all."""
        plan = self.cycle.plan
        while level < plan.passes:
            self._launch_pass(level + 1, columns)
            if not self._decide(level, True, ctx):
                return level + 1
            level += 1
        return level

    def _draft_while_wanted(self, level: int, columns: int, ctx: Context) -> int:
        """Further passes for as long as the plan wants them; returns the number of all. One that will probably be
        wanted is launched before the plan is asked; if it was not, what it drafted is left out."""
        plan, predictor = self.cycle.plan, self.cycle.predictor
        predictor.set_pass_seconds(ctx.costs.draft(plan.width))
        while True:
            early = level < plan.passes and predictor.likely(level)
            if early:
                self._launch_pass(level + 1, columns)
            if not self._decide(level, early, ctx):
                return level
            level += 1
            if not early:
                self._launch_pass(level, columns)

    def _launch_pass(self, level: int, columns: int) -> None:
        def work() -> None:
            self.cycle.next_pass(self.sampler)
            self.cycle.publish_report()

        self._expect_report(level)
        self._run(("pass", columns), work)
        self._launched_passes = level

    def _expect_report(self, level: int) -> None:
        """So many passes will be told next."""
        assert self.cycle.reports is not None
        self._report_numbers[level] = self.cycle.reports.expect()

    def _decide(self, level: int, early: bool, ctx: Context) -> bool:
        """The plan's decision after this many passes."""
        plan, reports = self.cycle.plan, self.cycle.reports
        if level not in plan.asked:
            self._decision = Decision(level < plan.passes, plan.rows)
            return self._decision.go_on
        assert reports is not None
        self._report_block = reports.wait(self._report_numbers[level])
        started = time.perf_counter()
        self._decision = plan.decision(level, self.cycle.views[self._report_block], ctx)
        if not early:
            self._decision_seconds += time.perf_counter() - started
        if level < plan.passes:
            self.cycle.predictor.observe(level, self._decision.go_on)
        return self._decision.go_on

    def _run(self, key: Key, work: Callable[[], None]) -> None:
        self.cycle.gpu_target.graph_cache.run((*key, *self._key), work)

    def _start_event(self) -> DeviceEvent:
        """Where what is launched next begins: at the end of what was launched last, unless something may have come
        between, if only that there was nothing to do. A mark of its own would hold the device up a little."""
        return (
            self._event()
            if self.stream_used or self._last_launched is None or self._last_launched.done()
            else self._last_launched
        )

    def _event(self) -> DeviceEvent:
        return (self._spare_events.pop() if self._spare_events else DeviceEvent(self.cycle.gpu_target.device)).record(
            self._stream
        )

    def collect(self) -> Step:
        """Wait for the oldest cycle under way, and make its Step."""
        sequence, cycle, results = self.sequence, self._launched.pop(0), self.cycle.results
        cycle.end.wait()
        arrays = results.arrays[results.wait(cycle.number)]
        drafted, kept, path, bonus = read_results(arrays, sequence.tokens[-1], cycle.places)
        split = self._split(cycle)
        tree = drafted.select(kept)
        tokens, text = sequence.accept(tree, Verdict(path, bonus))
        self.cycle.gpu_target.length_bound = len(sequence.tokens) + sum(other.passes + 1 for other in self._launched)
        finish, recorded = sequence.finish, cycle.recorded
        return Step(tokens, text, tree, path, drafted, kept, cycle.passes, split, finish, recorded)

    def _split(self, cycle: LaunchedCycle) -> Split:
        """Where the time since the last cycle's end went."""
        events, last = cycle.drafting, self._last_collected or cycle.drafting[0]
        draft = sum(start.seconds_until(end) for start, end in zip(events[::2], events[1::2], strict=True))
        verify, total = events[-1].seconds_until(cycle.end), last.seconds_until(cycle.end)
        if self._last_collected is None and self._prefill_start is not None:
            self.prefill_seconds = self._prefill_start.seconds_until(last)
        self._spare_events += {*events, last}
        self._last_collected = cycle.end
        policy = min(cycle.decision_seconds, draft)
        return Split(draft - policy, verify, policy, other=max(total - draft - verify, 0.0))


class DeviceEvent:
    """A moment in the order of the device's work."""

    def __init__(self, device: torch.device):
        self._time = 0.0
        self._cuda_event: Any = None
        if device.type == "cuda":  # making one takes longer than setting it
            self._cuda_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self, stream: Any) -> DeviceEvent:
        """It is now, and no longer when it was before."""
        self._time = time.perf_counter()
        if self._cuda_event is not None:
            self._cuda_event.record(stream)
        return self

    def wait(self) -> None:
        if self._cuda_event is not None:
            self._cuda_event.synchronize()

    def done(self) -> bool:
        return self._cuda_event is None or bool(self._cuda_event.query())

    def seconds_until(self, other: DeviceEvent) -> float:
        """Seconds."""
        if self._cuda_event is None or other._cuda_event is None:
            return other._time - self._time
        return 0.0 if self is other else float(self._cuda_event.elapsed_time(other._cuda_event)) / 1000


def current_stream(device: torch.device) -> Any:
    """Where work on this device is launched just now; asking takes longer than setting a mark."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
