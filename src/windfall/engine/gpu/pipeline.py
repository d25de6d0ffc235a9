"""Runs the cycles of one request: launches their CUDA graphs, and reads their results one cycle later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from windfall.core.types import Split, Step, Verdict
from windfall.engine.gpu.cycle import Cycle
from windfall.engine.gpu.drafters import ChildSampler
from windfall.engine.gpu.events import DeviceEvent, Events
from windfall.engine.gpu.graphs import Key
from windfall.engine.gpu.target import sampling_key
from windfall.engine.gpu.tree import read_results
from windfall.engine.sequence import Sequence
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Opening

CAPTURE_LENGTH_TOKENS = 64  # committed tokens during capture; the graphs are the same for any number


class StartedCycle(NamedTuple):
    """A cycle whose first draft passes are launched."""

    start: DeviceEvent
    first_passes_end: DeviceEvent | None  # None: the rest of the cycle is launched at once
    opening: Opening
    columns: int  # the bound on columns of its draft passes
    captures: int  # graphs captured before it


class LaunchedCycle(NamedTuple):
    """A cycle whose passes are all launched."""

    number: int  # of its results in the mailbox
    passes: int  # draft passes
    places: int  # in the tree after these passes
    drafting: list[DeviceEvent]  # start and end of each span of draft passes
    end: DeviceEvent
    decision_seconds: float  # time that the device waited for decisions
    recorded: bool  # whether graphs were captured meanwhile, which makes its times useless


class Pipeline:
    """Launches the cycles of one request, and collects their results in order.

    While the host collects a cycle, the device runs the next one.
    """

    def __init__(self, cycle: Cycle, sampler: ChildSampler, sequence: Sequence):
        self.cycle, self.sampler, self.sequence = cycle, sampler, sequence
        self._key = (cycle.buffers_id, sampler.key, sampling_key(sequence.params))
        self._started: StartedCycle | None = None
        self._launched: list[LaunchedCycle] = []
        self._report_numbers: dict[int, int] = {}  # number of passes → number of their report in the mailbox
        self._events = Events(cycle.gpu_target.device)
        self._prefill_start: DeviceEvent | None = None
        self.prefill_seconds = 0.0  # known after the first `collect`
        self._last_launched: DeviceEvent | None = None  # end of the last launched cycle
        self._last_collected: DeviceEvent | None = None  # end of the last collected cycle
        self.stream_used = False  # whether the caller may have used the stream since the last launch
        self._decision_seconds = 0.0  # of the current cycle
        self._decision = Decision(False, 1)  # the last one of the current cycle
        self._report_block = 0  # block of the last report
        self._launched_passes = 0  # of the current cycle, wasted ones included

    def capture_graphs(self, ctx: Context) -> None:
        """Capture all CUDA graphs that this request may need before it starts, so that no cycle waits for a capture."""
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
        for count in {self.levels_at_once} if self.levels_at_once else openings:
            cycle.set_length(CAPTURE_LENGTH_TOKENS)
            self._launch_first_passes(min(count, plan.passes), columns)
        if plan.decide is not None and plan.passes > 1 and not self.levels_at_once:
            cycle.set_length(CAPTURE_LENGTH_TOKENS)  # the buffers have room for the passes of one cycle only
            self._launch_pass(2, columns)

    def prefill(self) -> None:
        """Prefill the prompt."""
        self._prefill_start = self._events.mark()
        self.cycle.start(self.sequence.tokens)

    def launch_first_passes(self, ctx: Context) -> None:
        """Launch the first draft passes of the next cycle; `launch` launches the rest.

        They run while the host collects an earlier cycle or waits for the caller. The time between the two launches
        does not count as drafting.
        """
        self._started = self._start_cycle(self._start_event(), ctx)._replace(first_passes_end=self._events.mark())

    def _start_cycle(self, start: DeviceEvent, ctx: Context) -> StartedCycle:
        cycle, plan, draft = self.cycle, self.cycle.plan, self.cycle.draft
        before, columns = cycle.gpu_target.graph_cache.captures, 0
        opening = plan.begin(ctx)
        self._decision_seconds, self._launched_passes = 0.0, 0
        self._decision = Decision(False, opening.rows)
        dice = self.sequence.dice
        if dice:
            cycle.gpu_target.set_kappa(dice.kappa)
        if plan.passes:
            assert draft is not None
            columns = draft.columns
            self.sequence.policy.start_cycle(ctx)
            cycle.send_terms(ctx)
            self._launch_first_passes(opening.passes, columns)
        return StartedCycle(start, None, opening, columns, before)

    def launch(self, ctx: Context) -> None:
        """Launch another cycle, or the rest of one whose first passes are launched."""
        cycle, plan, gpu_target = self.cycle, self.cycle.plan, self.cycle.gpu_target
        self._events.use_current_stream()
        started, self._started = self._started or self._start_cycle(self._start_event(), ctx), None
        start, first_passes_end, (passes, _), columns, before = started
        drafting = [start]
        if first_passes_end is not None and (self.stream_used or first_passes_end.done()):
            drafting += [first_passes_end, self._events.mark()]
        elif first_passes_end is not None:
            self._events.give_back(first_passes_end)
        if plan.decide is not None:
            if self.levels_at_once:
                passes = self._count_wanted(min(passes, self._launched_passes), ctx)
            elif plan.lookahead:
                passes = self._draft_with_lookahead(passes, columns, ctx)
            else:
                passes = self._draft_while_wanted(passes, columns, ctx)
        drafting.append(self._events.mark() if passes else start)
        _, rows, levels = self._decision
        cycle.limit_verified(self._places_after(passes if levels is None else levels))
        gpu_target.length_bound += passes + 1
        number, self._last_launched = self._launch_verify(self._verify_size(rows)), self._events.mark()
        self.stream_used, recorded = False, gpu_target.graph_cache.captures > before
        places = self._places_after(passes)
        self._launched.append(
            LaunchedCycle(number, passes, places, drafting, self._last_launched, self._decision_seconds, recorded)
        )

    def _verify_size(self, rows: int) -> int:
        """The size of the verify pass for this number of rows: the next of the plan's sizes."""
        plan = self.cycle.plan
        return min(min((size for size in plan.sizes if size >= rows), default=rows), plan.rows)

    def _places_after(self, levels: int) -> int:
        """The number of places in the tree after this number of passes."""
        if levels >= self._launched_passes:
            return self.cycle.capacity
        if self.cycle.rule.selective:  # its trees have no empty places, so that only the report knows
            return int(self.cycle.views[self._report_block].summary(levels).nodes) if levels else 1
        return self.cycle.places_after(levels)

    @property
    def levels_at_once(self) -> int:
        """Levels that are drafted before the first decision, since a drafter predicts them at once; 0: it does not."""
        plan, draft = self.cycle.plan, self.cycle.draft
        return 0 if draft is None or plan.decide is None else min(draft.levels, plan.passes)

    def passes_run(self, step: Step) -> int:
        """The draft passes that ran for this Step: at least those that its plan wanted."""
        return max(self.levels_at_once, step.draft_passes) if step.draft_passes else 0

    def _launch_first_passes(self, count: int, columns: int) -> None:
        """Launch the first draft passes as one graph, with a report at the end if the plan decides."""
        asks, count = self.cycle.plan.decide is not None, self.levels_at_once or count
        if asks:
            self._expect_report(*range(1, count + 1))
        self._run(("draft", count, asks, columns), lambda: self._run_passes(count, asks))
        self._launched_passes = count

    def _launch_verify(self, rows: int) -> int:
        """Launch a verify pass; returns the number of its results in the mailbox."""
        cycle, columns = self.cycle, self.cycle.gpu_target.columns(rows)
        number = cycle.results.expect()
        params, noise = self.sequence.params, self.sampler.noise
        self._run(("verify", rows, columns), lambda: cycle.verify(rows, columns, params, noise))
        return number

    def _run_passes(self, count: int, asks: bool) -> None:
        """Run the first draft passes, and publish a report if the plan decides."""
        self.cycle.draft_passes(count, self.sampler)
        if asks:
            self.cycle.publish_report()

    def _count_wanted(self, level: int, ctx: Context) -> int:
        """How many of the levels that are drafted already the plan wants; the nodes of others are ignored."""
        last, ahead = self._launched_passes, self.cycle.plan.lookahead
        while level < last or not ahead:
            go_on = self._decide(level, True, ctx)
            if not go_on or level == last:
                return min(level + ahead, last)
            level += 1
        return level

    def _draft_with_lookahead(self, level: int, columns: int, ctx: Context) -> int:
        """Launch further draft passes, and decide about each while the one before it runs; returns the total number."""
        plan = self.cycle.plan
        while level < plan.passes:
            self._launch_pass(level + 1, columns)
            if not self._decide(level, True, ctx):
                return level + 1
            level += 1
        return level

    def _draft_while_wanted(self, level: int, columns: int, ctx: Context) -> int:
        """Launch further draft passes until the plan stops; returns the total number of passes that it wanted.

        A pass that is likely to follow is launched before the decision. If it is not wanted, its nodes are ignored.
        """
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

    def _expect_report(self, *levels: int) -> None:
        """The next report is the one after the last of these passes."""
        assert self.cycle.reports is not None
        self._report_numbers.update(dict.fromkeys(levels, self.cycle.reports.expect()))

    def _decide(self, level: int, early: bool, ctx: Context) -> bool:
        """Store the plan's decision after this pass; returns whether drafting goes on."""
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
        """The start of the next cycle: the end of the last launched one if the device goes on without a pause.

        This saves recording an event, which delays the device slightly.
        """
        last = self._last_launched
        return self._events.mark() if self.stream_used or last is None or last.done() else last

    def collect(self) -> Step:
        """Wait for the oldest launched cycle and return its Step."""
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
        """The time since the end of the last collected cycle, divided among drafting, verifying and the rest."""
        events, last = cycle.drafting, self._last_collected or cycle.drafting[0]
        draft = sum(start.seconds_until(end) for start, end in zip(events[::2], events[1::2], strict=True))
        verify, total = events[-1].seconds_until(cycle.end), last.seconds_until(cycle.end)
        if self._last_collected is None and self._prefill_start is not None:
            self.prefill_seconds = self._prefill_start.seconds_until(last)
        self._events.give_back(*{*events, last})
        self._last_collected = cycle.end
        policy = min(cycle.decision_seconds, draft)
        return Split(draft - policy, verify, policy, other=max(total - draft - verify, 0.0))
