"""The scheduler: order, memory, cancelling, deadlines, preemption and failures, on a tiny model and a fake runner."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.scheduling import alone, engine, finish, memory, request, runner, tokens
from windfall import registry
from windfall.core.sampling import noise_bits
from windfall.core.tree import DraftTree
from windfall.core.types import InputError, SamplingParams, Split, Step, Verdict
from windfall.costs.acceptance import Calibrator
from windfall.engine.batch_runner import Outcome, Use
from windfall.engine.request import Request
from windfall.engine.scheduler import Scheduler
from windfall.engine.sequence import Sequence

PAGE_TOKENS = 16


def scheduler_of(requests: list[Request], max_requests: int = 8, bytes: int | None = None) -> Scheduler:
    made = Scheduler(runner(engine(), bytes), max_requests)
    for each in requests:
        made.submit(each)
    return made


@pytest.fixture
def short_sighted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are admitted even if they are preempted soon."""
    monkeypatch.setattr("windfall.engine.scheduler.ADMISSION_TOKENS", 2)


def test_more_requests_than_run_together_are_answered_in_order() -> None:
    requests = [request(engine(), i, max_new_tokens=4 + i) for i in range(7)]
    made = scheduler_of(requests, max_requests=3)
    made.step()
    assert (made.running, made.waiting) == (3, 4)
    assert [bool(each.steps) for each in requests] == [True] * 3 + [False] * 4
    finish(made)
    assert made.runner.live == {} and engine().target.decoder.lengths == []
    assert [tokens(each) for each in requests] == [alone(engine(), i, max_new_tokens=4 + i) for i in range(7)]


def test_the_memory_decides_how_many_run() -> None:
    requests = [request(engine(), i) for i in range(5)]
    made = scheduler_of(requests, bytes=memory(engine(), 2, 21))
    made.step()
    assert (made.running, made.waiting) == (2, 3)
    finish(made)
    assert [tokens(each) for each in requests] == [alone(engine(), i) for i in range(5)]


def test_running_requests_do_not_wait_for_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.engine.scheduler.PREFILL_TOKENS", 15)
    requests = [request(engine(), i) for i in range(5)]
    made = scheduler_of(requests)
    running = []
    while not made.idle:
        made.step()
        running.append(made.running)
    assert running[:3] == [2, 4, 5]  # two prompts of nine tokens at a time
    assert [tokens(each) for each in requests] == [alone(engine(), i) for i in range(5)]


def test_a_request_that_can_never_fit_is_refused_with_its_numbers() -> None:
    made = scheduler_of([], bytes=memory(engine(), 1, 100))
    made.submit(request(engine(), 0, max_new_tokens=91))
    with pytest.raises(InputError, match=r"room for 101 tokens \(9 of the prompt and 92 new ones\), but .* holds 100"):
        made.submit(request(engine(), 1, max_new_tokens=92))
    assert finish(made) > 0 and made.runner.live == {}


def test_cancelling_in_the_queue_and_while_running() -> None:
    requests = [request(engine(), i) for i in range(4)]
    made = scheduler_of(requests, max_requests=2)
    made.step()
    requests[0].cancelled = requests[3].cancelled = True
    made.step()
    assert [each.finish for each in requests] == ["cancelled", None, None, "cancelled"]
    assert requests[2].steps  # it has the place of the first
    finish(made)
    assert requests[0].generation().finish_reason == "cancelled" and not requests[3].steps
    wanted = [alone(engine(), i) for i in range(4)]
    assert tokens(requests[0]) == wanted[0][: len(tokens(requests[0]))]
    assert [tokens(each) for each in requests[1:3]] == wanted[1:3]


def test_a_deadline_ends_a_text_as_it_is() -> None:
    requests = [request(engine(), 0, deadline=1e4), request(engine(), 1), request(engine(), 2, deadline=1e-9)]
    made = scheduler_of(requests)
    made.step()
    requests[0].expires = time.perf_counter()
    finish(made)
    assert [each.generation().finish_reason for each in requests] == ["deadline", "length", "deadline"]
    assert tokens(requests[1]) == alone(engine(), 1) and len(requests[0].steps) == 1 and not requests[2].steps


@pytest.mark.parametrize("drafter", ["ngram", "small", "hydra"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.9, "seed": 5, "presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2}],
)
def test_preempted_requests_go_on_with_the_same_text(
    drafter: str, sampling: dict[str, Any], short_sighted: None
) -> None:
    """Three fit at first. Then the longest outgrows the memory, and the newest waits until another has ended."""
    made = engine(drafter)
    how = {"max_new_tokens": 28, **sampling}
    requests = [request(made, i, **how) for i in range(3)]
    scheduler = Scheduler(runner(made, memory(made, 3, 20)), 8)
    for each in requests:
        scheduler.submit(each)
    seen = set[tuple[int, int]]()
    while not scheduler.idle:
        scheduler.step()
        seen.add((scheduler.running, scheduler.waiting))
    assert {(3, 0), (2, 1)} <= seen and requests[2].steps[0].prefill_seconds > 0
    assert sum(step.prefill_seconds > 0 for step in requests[2].steps) == 2  # it was prefilled twice
    assert [tokens(each) for each in requests] == [alone(made, i, **how) for i in range(3)]


def test_the_last_running_request_is_never_preempted() -> None:
    only = request(engine(), 0)
    made = scheduler_of([only], bytes=memory(engine(), 1, 30))
    made.runner.memory = 1
    finish(made)
    assert tokens(only) == alone(engine(), 0)


def test_a_suspended_scheduler_goes_on_after_another_generation() -> None:
    requests = [request(engine(), i) for i in range(3)]
    made = scheduler_of(requests, max_requests=2)
    made.step()
    made.suspend()
    assert (made.running, made.waiting) == (0, 3)
    alone(engine(), 9)
    finish(made)
    assert [tokens(each) for each in requests] == [alone(engine(), i) for i in range(3)]


def test_a_request_that_raises_fails_alone() -> None:
    def broken(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if prefix.shape[1] > 12:
            raise OSError("no room")
        return scores

    requests = [request(engine(), 0), request(engine(), 1, processors=(broken,)), request(engine(), 2)]
    made = scheduler_of(requests)
    finish(made)
    with pytest.raises(OSError, match="no room"):
        requests[1].generation()
    assert [tokens(requests[i]) for i in (0, 2)] == [alone(engine(), i) for i in (0, 2)]
    assert made.runner.live == {}


def test_a_prompt_that_cannot_be_prefilled_fails_alone() -> None:
    requests = [request(engine(), i) for i in range(3)]
    requests[1].sequence.tokens[3] = 10**6  # no such token
    made = scheduler_of(requests)
    finish(made)
    assert requests[1].error is not None
    assert [tokens(requests[i]) for i in (0, 2)] == [alone(engine(), i) for i in (0, 2)]


def test_closing_ends_everything() -> None:
    requests = [request(engine(), i) for i in range(4)]
    made = scheduler_of(requests, max_requests=2)
    made.step()
    made.close()
    assert made.idle and {each.finish for each in requests} == {"cancelled"} and made.runner.live == {}


# ---- a runner that works ahead


class LateRunner:
    """A runner without a model, with pages: a round launches work and returns the Steps of the round before."""

    def __init__(self, pages: int) -> None:
        self.pages, self.live, self.launched = pages, list[Sequence](), list[Sequence]()

    def join(self, sequences: list[Sequence]) -> None:
        assert not set(sequences) & set(self.live)
        self.live += sequences
        assert self.fits({each: len(each.tokens) for each in self.live}) or len(self.live) == 1

    def leave(self, sequences: Iterable[Sequence]) -> None:
        leaving = set(sequences)
        self.live, self.launched = ([each for each in own if each not in leaving] for own in (self.live, self.launched))

    def round(self) -> dict[Sequence, Outcome]:
        ready, self.launched = self.launched, list(self.live)
        assert not any(each.finish for each in ready), "it was told to leave"
        return {each: self._step(each) for each in ready}

    def _step(self, sequence: Sequence) -> Step:
        drawn = noise_bits(sequence.params.seed or 0, torch.tensor([len(sequence.tokens)]), torch.tensor([0]))
        tree, verdict = DraftTree.root(sequence.tokens[-1]), Verdict(torch.tensor([0]), int(drawn) % 50)
        taken, text = sequence.accept(tree, verdict)
        return Step(taken, text, tree, verdict.path, tree, verdict.path, 0, Split(), sequence.finish)

    @property
    def has_room(self) -> bool:
        return False

    def fits(self, lengths: Mapping[Sequence, int]) -> bool:
        return sum(-(-length // PAGE_TOKENS) for length in lengths.values()) <= self.pages

    @property
    def max_length(self) -> int:
        return self.pages * PAGE_TOKENS

    @property
    def use(self) -> Use:
        return Use(len(self.live) / self.pages)


def table_request(number: int, length: int, new: int) -> Request:
    target: Any = SimpleNamespace(tokenizer=None, eos=(), context=None)
    params = SamplingParams(max_new_tokens=new, seed=number)
    policy = registry.policy("none")
    sequence = Sequence([1] * length, params, policy, target, False, {"greedy": Calibrator()})
    return Request(number, sequence)


def wanted_of(number: int, length: int, new: int) -> list[int]:
    positions = torch.arange(length, length + new)
    return (noise_bits(number, positions, torch.tensor([0]))[:, 0] % 50).tolist()


def test_steps_may_come_a_round_late() -> None:
    only = table_request(3, 10, 4)
    made = Scheduler(LateRunner(pages=4), 8)
    made.submit(only)
    assert finish(made) == 5 and tokens(only) == wanted_of(3, 10, 4)


def test_a_late_runner_with_pages_gives_every_text_under_preemption(short_sighted: None) -> None:
    chance = random.Random(0)
    sizes = [(chance.randint(1, 60), chance.randint(1, 90)) for _ in range(150)]
    requests = [table_request(i, *size) for i, size in enumerate(sizes)]
    made, waiting, preempted = Scheduler(LateRunner(pages=16), 6), list(requests), 0
    while waiting or not made.idle:
        if waiting and chance.random() < 0.5:
            made.submit(waiting.pop(0))
        before = made.waiting
        made.step()
        preempted += made.waiting > before
        if chance.random() < 0.03:
            made.suspend()
    assert preempted > 5
    assert [tokens(each) for each in requests] == [wanted_of(i, *size) for i, size in enumerate(sizes)]
    assert made.runner.live == [] and made.idle


# ---- many requests


def test_two_hundred_requests_with_cancels_deadlines_and_preemptions(short_sighted: None) -> None:
    made, chance = engine(), random.Random(1)
    sizes = [{"length": chance.randint(1, 24), "max_new_tokens": chance.randint(1, 16)} for _ in range(200)]
    for i, size in enumerate(sizes):
        size |= {"temperature": 0.9, "seed": i} if i % 2 else {}
    deadlines = [0.1 * chance.random() if chance.random() < 0.1 else None for _ in sizes]
    scheduler = Scheduler(runner(made, memory(made, 4, 20)), 8)
    requests, waiting = list[Request](), list(range(200))
    counts = Counter[str]()
    while waiting or not scheduler.idle:
        for _ in range(min(len(waiting), chance.choice((0, 0, 1, 5)))):
            i = waiting.pop(0)
            requests.append(request(made, i, deadline=deadlines[i], **sizes[i]))
            scheduler.submit(requests[-1])
        if requests and chance.random() < 0.1:
            chance.choice(requests[-8:]).cancelled = True
        before = scheduler.waiting
        scheduler.step()
        counts["preempted"] += scheduler.waiting > before
        made.target.decoder.cache.check()
    assert scheduler.idle and scheduler.runner.live == {} and made.target.decoder.lengths == []
    assert made.drafter.histories == []
    counts.update(each.finish or "failed" for each in requests)
    for i, each in enumerate(requests):
        wanted, found = alone(made, i, **sizes[i]), tokens(each)
        assert found == (wanted if each.finish == "length" else wanted[: len(found)]), i
    assert counts["length"] > 100 and min(counts["cancelled"], counts["preempted"], counts["deadline"]) > 0, counts
