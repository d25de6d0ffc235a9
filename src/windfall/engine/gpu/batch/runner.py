"""Decodes several requests together on a GPU: gives them seats and pages, launches rounds, and collects results."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch

from windfall.core.tree import Integers
from windfall.core.types import Split
from windfall.costs.acceptance import Calibrator, shifted_weights
from windfall.costs.curves import Costs
from windfall.costs.online import OnlineCosts
from windfall.costs.rounds import RoundCosts, Situation
from windfall.drafters.base import GpuForm
from windfall.engine.batch_runner import Outcome, Use
from windfall.engine.gpu.batch.chunks import Prompt
from windfall.engine.gpu.batch.drafters import batch_drafter
from windfall.engine.gpu.batch.learning import SpareTime, learn
from windfall.engine.gpu.batch.paged_cache import PagedCache
from windfall.engine.gpu.batch.prefill import SHARED_ROWS, Prefill
from windfall.engine.gpu.batch.results import BatchStep, Results, Sample
from windfall.engine.gpu.batch.round import MAX_ROUND_ROWS, ROUND_ROWS, SAMPLED, Round, round_rows
from windfall.engine.gpu.batch.round_graphs import RoundGraphs
from windfall.engine.gpu.batch.state import MAX_BACKLOG, BatchState
from windfall.engine.gpu.batch.target import BatchTarget, Kind
from windfall.engine.gpu.cycle import kernel_rule
from windfall.engine.gpu.events import DeviceEvent, Events
from windfall.engine.gpu.forward import PagedForward
from windfall.engine.sequence import Sequence
from windfall.kernels.pages import PAGE_TOKENS, pages_for, tile_rows
from windfall.kernels.rules import Rule
from windfall.policies.base import TreePolicy
from windfall.policies.budget import Budget, Load, Sizes

MAX_FLIGHT = 2  # rounds that are launched before the host reads the results of the first
MIN_SPAN_PAGES = 32  # of a text that passes read at the least
SPAN_FACTOR = 4  # between the numbers of pages that captured passes read
PENDING = (1, 2, 4, 8, MAX_BACKLOG)  # tokens of each text that a captured pass takes in
LESSONS = 0.3  # share of the rounds with drafts from which acceptance is learned
EAGER_LESSONS = 8  # the first of them follow each other
MAX_WORKS = 2  # that wait for spare time
GRANTED_PAGES = 4  # that a text gets in advance, so that its page table seldom changes
GRANTING_SHARE = 0.5  # of all pages that must be free for this
SEATS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # requests of captured rounds


class Limits(NamedTuple):
    """The largest sizes of a batch."""

    seats: int  # requests at a time
    pages: int  # of the KV cache
    longest: int  # tokens of a text
    passes: int  # draft passes of a round
    width: int  # nodes of a request that a draft pass expands
    k: int  # children of a node

    @property
    def nodes(self) -> int:
        """Nodes of a tree."""
        return 1 + self.k * (1 + self.width * (self.passes - 1)) if self.passes else 1


class Launched(NamedTuple):
    """A round that is launched."""

    number: int  # of its results in the mailbox
    turn: int  # of its sample
    texts: list[Sequence]  # by seat
    left: set[Sequence]  # texts that have left since then, and may have come back
    situation: Situation
    sizes: Sizes
    recorded: bool  # whether graphs were captured
    shared: bool  # whether prompts shared the verify pass
    follows_at_once: bool  # whether nothing was launched between the round before it and this one
    prompts: list[tuple[DeviceEvent, DeviceEvent]]  # start and end of passes over prompts since the round before it
    start: DeviceEvent
    drafted: DeviceEvent
    end: DeviceEvent


class GpuBatchRunner:
    """A `BatchRunner` on a KV cache in pages, for requests that share a budget and draw their tokens on the device.

    The host reads the results of a round while the next one runs.
    """

    def __init__(
        self,
        cache: PagedCache,
        form: GpuForm | None,
        drafting: PagedForward | None,
        policy: TreePolicy,
        budget: Budget,
        online_costs: OnlineCosts,
        limits: Limits,
        undrafted: str = "",
    ):
        """`drafting` is the `drafter_forward` of `form`, and `budget` that of `policy`. `undrafted`: why requests are
        decoded without drafts although the policy would draft."""
        gpu_target, forward = cache.gpu_target, cache.forward
        self.cache, self.pool = cache, cache.pool
        self.gpu_target, self.policy, self.budget, self.undrafted = gpu_target, policy, budget, undrafted
        limits = limits._replace(seats=min(limits.seats, SEATS[-1]))  # more requests wait
        self.costs = RoundCosts(online_costs.costs, ROUND_ROWS, online_costs.learns)
        self.limits = limits
        pages = pages_for(limits.longest)
        self.state = BatchState(
            gpu_target.graph_cache, limits.seats, pages, limits.passes + 1, limits.nodes, limits.passes + 1
        )
        rows = tile_rows(forward.group)
        self.target = BatchTarget(cache, self.state, rows)
        self.drafter = None if form is None or not limits.passes else batch_drafter(form, drafting, self.target)
        if self.drafter is not None:
            self.drafter.reserve(limits.width * limits.passes)
        self.work = Round(self.state, self.target, self.drafter)
        gpu_target.graph_cache.independent.add(self.state)  # at last: it keeps the state if anything else fails
        cache.lenders.add(self)
        self.texts: list[Sequence] = []  # by seat
        self._pages: dict[Sequence, list[int]] = {}
        self._launched: list[Launched] = []
        self._budget_sizes: Sizes | None = None  # of the last round
        self._turn = 0  # see `Round`
        self.learns = True  # about acceptance
        self._lessons = 0  # rounds from which acceptance was learned
        self._after_plain = False  # whether the last round was plain: the one after it may be a probe
        self._chance = random.Random(0)
        self._spare_time = SpareTime()
        self._pending = 1  # an upper bound on the tokens of a text that the drafter has to take in
        self._changed: set[Sequence] = set()  # texts whose acceptance the device does not know yet
        self._kinds: Counter[Kind] = Counter()  # how the texts draw their tokens
        self._rounds_with_room = 0  # until a text may need more pages
        self._follows_at_once = False  # whether the next round follows the last one without anything between
        self._last_end: DeviceEvent | None = None  # of the round that was collected last
        self._events = Events(gpu_target.device)
        self.prefill = Prefill(self.state, self.target, self.drafter, self._events)
        self._set_span()

    def suits(self, sequence: Sequence) -> bool:
        """Whether this runner can decode this text: its policy is the budget's, and it draws on the device."""
        params, own = sequence.params, sequence.policy
        same = type(own) is type(self.policy) and own == self.policy
        return same and not (params.needs_host or params.wants_logprobs)

    @property
    def busy(self) -> bool:
        """Whether texts run or wait for their prefill."""
        return bool(self._pages)

    def close(self) -> None:
        """Drop the graphs and the queued work, which would otherwise keep the memory of this runner in use."""
        self._spare_time.clear()
        self.gpu_target.graph_cache.forget(self.state)

    # requests

    def fits(self, lengths: Mapping[Sequence, int]) -> bool:
        """Whether there are pages for texts of these lengths, if no other runner uses any."""
        return len(lengths) <= self.limits.seats and self.pages_needed(lengths) <= self.pool.pages

    def pages_needed(self, lengths: Mapping[Sequence, int]) -> int:
        """Pages for texts of these lengths; those that texts share are counted for each."""
        return int(self._needed(np.fromiter(lengths.values(), np.int64, len(lengths))).sum())

    @property
    def has_room(self) -> bool:
        """Whether the texts have the pages for the next rounds, or there are enough for any texts."""
        return self._rounds_with_room >= MAX_FLIGHT or len(self._pages) * self.state.pages <= self.pool.pages

    def _needed(self, lengths: Integers) -> Integers:
        """Pages for texts of these lengths, for the rounds in flight and one more."""
        return -(-np.minimum(lengths + self._margin, self.state.longest) // PAGE_TOKENS)

    def _needed_by(self, text: Sequence) -> int:
        """Pages that a text needs now."""
        return pages_for(min(len(text.tokens) + self._margin, self.state.longest))

    @property
    def _margin(self) -> int:
        """Tokens that a text may get in the rounds in flight and one more."""
        return (MAX_FLIGHT + 1) * self.state.pending

    @property
    def max_length(self) -> int | None:
        """The number of tokens up to which a single text fits."""
        return self.max_length_of(1)

    def max_length_of(self, count: int) -> int:
        """The number of tokens up to which this number of texts fit together."""
        return min(self.state.longest, self.pool.pages // count * PAGE_TOKENS) - self._margin

    @property
    def use(self) -> Use:
        """The share of the pages that texts hold, and the budget of the last round."""
        return Use(1 - self.pool.available / self.pool.pages, self._budget_sizes)

    @torch.inference_mode()
    def join(self, sequences: list[Sequence]) -> None:
        """Queue the prompts of these texts. They are processed between rounds, and then take part in them."""
        self.cache.forget_outdated()
        joined: list[Sequence] = []
        try:
            for text in sequences:
                self._seat(text)
                joined.append(text)
        except MemoryError:
            self.leave(joined)
            raise
        self._set_span()

    def _seat(self, text: Sequence) -> None:
        """Give a text pages, and queue its prompt."""
        known = self.pool.find(text.tokens[:-1])
        try:
            pages = known + self._take(text, len(known))
        except MemoryError:
            self.pool.release(known)
            raise
        self._pages[text] = pages
        self._changed.add(text)
        self.prefill.add(text, pages, len(known))

    @torch.inference_mode()
    def prefill_all(self) -> None:
        """Process the prompts of all texts that have joined."""
        self._events.use_current_stream()
        while self.prefill:
            self._admit(self.prefill.run())

    def _admit(self, ended: list[tuple[Prompt, Sequence]]) -> None:
        """The prompts of these texts have ended: they take part in the next round."""
        self._follows_at_once = False
        prompts, goals = [prompt for prompt, _ in ended], [*range(len(self.texts), len(self.texts) + len(ended))]
        self.state.admit([prompt.seat for prompt in prompts], goals, [prompt.tokens for prompt in prompts])
        for prompt, text in ended:
            self.texts.append(text)
            self._kinds[kind_of(text)] += 1
            self.pool.remember(prompt.tokens[:-1], prompt.pages)
        self._rounds_with_room = min(self._rounds_with_room, self._rounds_until_full([text for _, text in ended]))
        self.state.write(live=len(self.texts))

    @torch.inference_mode()
    def leave(self, sequences: Iterable[Sequence]) -> None:
        """Remove these texts; their pages become free. Results of rounds in flight are dropped."""
        seats = [*range(len(self.texts))]  # where the texts were before
        leaving = [text for text in sequences if text in self._pages]
        for launched in self._launched:
            launched.left.update(leaving)
        for text in leaving:
            pages = self._pages.pop(text)
            self._changed.discard(text)
            if not self.prefill.remove(text):
                done = len(text.tokens) - 1 - self.state.backlog  # tokens whose columns the drafter has, too
                self.pool.remember(text.tokens[: max(done, 0)], pages)
                seat = self.texts.index(text)  # which the last text takes
                self.texts[seat], seats[seat] = self.texts[-1], seats[-1]
                self.texts.pop()
                seats.pop()
                self._kinds[kind_of(text)] -= 1
            self.pool.release(pages)
        self._set_span()
        moved = [(source, goal) for goal, source in enumerate(seats) if source != goal]
        self.state.move([source for source, _ in moved], [goal for _, goal in moved])
        self.state.write(live=len(self.texts))

    def _take(self, text: Sequence, held: int) -> list[int]:
        """Pages for a text that holds this number; while many are free, also some that it will need later."""
        needed = max(self._needed_by(text) - held, 0)
        self.cache.make_room(needed)
        granted = 0
        if self.pool.free - needed > GRANTING_SHARE * self.pool.pages:
            most = pages_for(min(text.end + self._margin, self.state.longest))
            granted = min(GRANTED_PAGES, max(most - held - needed, 0), self.pool.available - needed)
        return self.cache.take(needed + granted)

    def return_granted(self) -> None:
        """Take back the pages that texts do not need yet."""
        for text, pages in self._pages.items():
            needed = self._needed_by(text)
            self.pool.release(pages[needed:])
            del pages[needed:]
        self._rounds_with_room = 0

    # rounds

    @torch.inference_mode()
    def round(self) -> dict[Sequence, Outcome]:
        """Launch the next rounds, with a chunk of the waiting prompts, and return the Steps of the oldest."""
        self._events.use_current_stream()
        while self.prefill and (not self.texts or len(self._launched) < MAX_FLIGHT):
            if self.texts and self.prefill.may_share:
                break  # with the next verify pass
            self._admit(self.prefill.run())
            if self.texts:
                break
        while self.texts and len(self._launched) < MAX_FLIGHT:
            self._launch()
        if not self._launched:
            return {}
        if self.texts and not len(self._spare_time):
            self._spare_time.add("sizes", self._prepare_sizes())
        self._spare_time.use(lambda: not self.work.results.has(self._launched[0].number))
        return self._collect()

    def _launch(self) -> None:
        cache, now = self.gpu_target.graph_cache, self._situation()
        self._update_settings()
        graphs = self._graphs(now.seats)
        sizes, rule = self._sizes(now, graphs)
        sizes = graphs.complete(sizes)
        self._budget_sizes = sizes if len(self.texts) > 1 else None
        self.state.write(floor=sizes.floor, limits=sizes.per_request or MAX_ROUND_ROWS)
        self.state.send()
        sizes = sizes._replace(rows=round_rows(max(sizes.rows, now.seats)) if sizes.passes else now.seats)
        captures, start = cache.captures, self._events.mark()
        if sizes.passes:
            graphs.run_drafts(sizes, rule)
        elif self.drafter is not None and self._pending >= self.state.backlog:  # there is no room for one more
            graphs.take_in()
            self._pending = 0
        drafted = self._events.mark()
        taken = self.prefill.share(sizes, graphs, now.requests, lambda rows: self.costs.recent(now).verify(rows, 0))
        number, shared = self.work.results.expect(), taken is not None and taken.chunk is not None
        graphs.run_verify(sizes, SHARED_ROWS if shared else 0)
        texts, times = list(self.texts), (start, drafted, self._events.mark())
        flags = (cache.captures > captures, shared, self._follows_at_once)
        prompts = self.prefill.take_spans()
        self._launched.append(Launched(number, self._turn, texts, set(), now, sizes, *flags, prompts, *times))
        self._follows_at_once = True
        self._turn += SAMPLED if sizes.passes else 0
        self._pending = sizes.passes + 1 if sizes.passes else self._pending + 1
        if taken is not None:
            self._admit(self.prefill.finish(taken, times[-1]))

    def _graphs(self, seats: int) -> RoundGraphs:
        """The passes of the next round for this number of seats."""
        waiting = min(self._pending, self.state.backlog)
        pending = next((size for size in PENDING if size >= waiting), waiting)
        kind = Kind.of_all([kind for kind, texts in self._kinds.items() if texts])
        return RoundGraphs(self.gpu_target.graph_cache, self.work, self.budget, seats, kind, pending)

    def _situation(self) -> Situation:
        """What the costs of the next round depend on."""
        requests = len(self.texts)
        seats = min(next(size for size in SEATS if size >= requests), self.state.seats)
        return Situation(seats, requests, sum([len(text.tokens) for text in self.texts]) // requests)

    def _sizes(self, now: Situation, graphs: RoundGraphs) -> tuple[Sizes, Rule]:
        """The sizes of the next round, and the rule by which its trees grow."""
        limits = self.limits
        wanted = self.budget.sizes(self._load(self.costs.recent(now), graphs))
        plan = self.budget.plan(wanted) or self.texts[0].policy.cached_plan
        assert plan is not None
        fits = wanted.passes <= limits.passes and wanted.width <= limits.width and wanted.k <= limits.k
        assert fits or not wanted.passes, "a budget's sizes exceed its largest ones"
        return wanted, kernel_rule(plan)

    def _prepare_sizes(self) -> Iterator[None]:
        """Let the budget compute the sizes of the rounds to come."""
        if not self.texts:
            return
        now = self._situation()
        costs = self.costs.at(now)
        yield
        if self.texts and self._situation().seats == now.seats:
            self.budget.prepare(self._load(costs, self._graphs(now.seats)))

    def _load(self, costs: Costs, graphs: RoundGraphs) -> Load:
        """What the budget decides by. Costs are those at the present length of context, so that the Load has none."""
        room = max([text.end - len(text.tokens) for text in self.texts])
        calibrator = self.budget.calibrator or self.texts[0].calibrator
        return Load(len(self.texts), 0, room, costs, calibrator, MAX_ROUND_ROWS, graphs)

    def _update_settings(self) -> None:
        """Give texts the pages that the next round may need, and note what was learned about their acceptance."""
        self._rounds_with_room -= 1
        if self._rounds_with_room < 0:
            self._add_pages()
        seats = [seat for seat, text in enumerate(self.texts) if text in self._changed] if self._changed else []
        if seats:
            texts = [self.texts[seat] for seat in seats]
            calibrators = [self.budget.calibrator or text.calibrator for text in texts]
            kappas = [text.calibrator.kappa if text.dice else 1.0 for text in texts]
            self.state.set_terms(seats, kappas, shifted_weights(calibrators, [text.correction.shift for text in texts]))
            self._changed.difference_update(texts)  # others still wait for their prefill

    def _add_pages(self) -> None:
        """Give every text the pages for this round, and count the rounds until one may need more."""
        needed = self._needed(np.array([len(text.tokens) for text in self.texts]))
        held = np.array([len(self._pages[text]) for text in self.texts])
        for seat in np.flatnonzero(needed > held).tolist():
            text = self.texts[seat]
            self._pages[text] += self._take(text, len(self._pages[text]))
            self.state.set_pages(seat, self._pages[text])
        self._rounds_with_room = self._rounds_until_full(self.texts)  # `_take` may have taken some back
        self._set_span()

    def _rounds_until_full(self, texts: list[Sequence]) -> int:
        """The number of rounds in which none of these texts needs more pages."""
        if not texts:
            return self.state.longest
        held = np.array([len(self._pages[text]) for text in texts])
        lengths, ends = np.array([(len(text.tokens), text.end) for text in texts]).T
        rounds = np.maximum(held * PAGE_TOKENS - lengths - self._margin, 0) // self.state.pending
        return int(np.where(held >= self._needed(ends), self.state.longest, rounds).min())

    def _set_span(self) -> None:
        """Passes read as many pages as the longest text has, on a coarse scale."""
        longest, span = max(map(len, self._pages.values()), default=1), MIN_SPAN_PAGES
        while span < longest:
            span *= SPAN_FACTOR
        self.state.span = min(span, self.state.pages)

    def _collect(self) -> dict[Sequence, Outcome]:
        launched, results = self._launched.pop(0), self.work.results
        block = results.arrays[results.wait(launched.number, patient=True)]
        self._spare_time.results_came()
        launched.end.wait()
        draft, verify = launched.start.seconds_until(launched.drafted), launched.drafted.seconds_until(launched.end)
        found = Results(block, len(launched.texts), launched.sizes)
        if not (launched.recorded or launched.shared):
            self._learn_costs(launched, draft, verify)
        prompts = sum(began.seconds_until(ended) for began, ended in launched.prompts)
        found.seconds, found.recorded = Split(draft, verify, prompts=prompts), launched.recorded
        steps = self._steps(launched, found)
        if found.drafted and self.learns and self._is_lesson():
            self._lessons += 1
            seconds = 0.0 if launched.recorded else found.seconds.total
            sample = Sample(block, found, launched.turn)
            self._spare_time.add("lesson", self._learn_acceptance(sample, launched.texts, seconds))
        self._after_plain = not found.drafted
        self._events.give_back(launched.start, launched.drafted, *(ended for _, ended in launched.prompts))
        if self._last_end is not None:
            self._events.give_back(self._last_end)
        self._last_end = launched.end
        return steps

    def _is_lesson(self) -> bool:
        """Whether acceptance is learned from this round: a probe, one of the first rounds, or one drawn at random.

        Requests are sampled in turn, so that a fixed interval could always choose the same ones.
        """
        if self._after_plain or self._lessons < EAGER_LESSONS:
            return len(self._spare_time) < MAX_WORKS
        return not len(self._spare_time) and self._chance.random() < LESSONS

    def _steps(self, launched: Launched, found: Results) -> dict[Sequence, Outcome]:
        """The Steps of the texts that have not left since; this runs for every request in every round."""
        steps: dict[Sequence, Outcome] = {}
        left, started = launched.left, self.prefill.started
        given = zip(launched.texts, found.tokens, found.accepted, strict=True)
        for seat, (text, drawn, count) in enumerate(given):
            if left and text in left:
                continue
            found.taken[seat] = text.extend(drawn[:count])
            found.ends[seat] = end = len(text.tokens) - text.prompt_length
            late, finish, waited = text.late_text, text.finish, 0.0
            late.ends.append(end)
            late.final = finish is not None
            if started and text in started:
                waited = started.pop(text).seconds_until(launched.start)
            step = steps[text] = BatchStep(found, seat, late, finish, waited)
            if text.params.stop:
                _ = step.text  # later tokens may complete a stop string and shorten the text
        return steps

    def _learn_acceptance(self, sample: Sample, texts: list[Sequence], seconds: float) -> Iterator[None]:
        """Let the budget, the calibrators and the corrections learn from some requests of the round."""
        outcome = sample.outcome(seconds)
        yield
        self.budget.observe(outcome)
        yield
        sampled = [texts[seat] for seat in sample.sampled]
        groups: dict[Calibrator, list[int]] = {}
        for place, text in enumerate(sampled):
            groups.setdefault(text.calibrator, []).append(place)
        for calibrator, places in groups.items():
            learn(outcome, calibrator, {place: sampled[place].correction for place in places})
        self._changed.update(text for text in sampled if text in self._pages)

    def _learn_costs(self, launched: Launched, draft: float, verify: float) -> None:
        """Correct the costs of rounds by the times of one."""
        now, sizes = launched.situation, launched.sizes
        if launched.follows_at_once and self._last_end is not None:
            self.costs.record_idle(now, sizes.passes > 0, self._last_end.seconds_until(launched.start))
        if sizes.passes:
            self.costs.record_drafts(now, sizes.passes, sizes.width, draft)
        self.costs.record_verify(now, sizes.rows, verify)


def kind_of(text: Sequence) -> Kind:
    """How a text draws its tokens."""
    greedy = text.params.greedy
    return Kind(greedy, not greedy and text.dice is not None, not greedy and text.params.filters)
