"""What the scheduler counts: the sums of all Steps, times, endings, preemptions, memory and budget."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.scheduling import engine, finish, memory, request, runner
from windfall.core.types import Step
from windfall.engine import counters as counting
from windfall.engine import scheduler as scheduling
from windfall.engine.batch_runner import Use
from windfall.engine.counters import Counters, Histogram
from windfall.engine.request import Request
from windfall.engine.scheduler import Scheduler
from windfall.engine.split_runner import SplitRunner
from windfall.policies.budget import Sizes


def test_a_histogram_counts_values_up_to_each_bound() -> None:
    made = Histogram((1, 2, 5))
    for value in (0.5, 1, 2, 5.1):
        made.add(value)
    made.add(1.5, times=3)
    assert made.cumulative == [2, 6, 6, 7] and made.sum == pytest.approx(13.1)


@pytest.fixture(scope="module")
def served() -> tuple[Counters, list[Request], list[Use]]:
    """The counters after three requests, and what was used on the way."""
    made = engine()
    scheduler = Scheduler(runner(made, memory(made, 3, 60)), 8)
    requests, used = [request(made, number) for number in range(3)], list[Use]()
    for each in requests:
        scheduler.submit(each)
    while not scheduler.idle:
        scheduler.step()
        used.append(scheduler.counters.use)
    return scheduler.counters, requests, used


def ended(counters: Counters) -> dict[str, int]:
    """Requests by finish reason."""
    counts = {reason: each.cumulative[-1] for reason, each in counters.durations.items()}
    return {reason: count for reason, count in counts.items() if count}


def test_the_sums_are_those_of_the_steps(served: tuple[Counters, list[Request], list[Use]]) -> None:
    counters, requests, used = served
    steps: list[Step] = [step for each in requests for step in each.steps]
    drafts = [step for step in steps if step.rows > 1]
    assert counters.prompt_tokens == 27 and counters.tokens == sum(len(step.tokens) for step in steps) == 36
    assert counters.rounds == len(used) == sum(counters.rows.counts)
    assert counters.rows.sum == sum(step.rows for step in steps)
    assert counters.drafts == len(drafts) > 0
    assert counters.verified == sum(step.rows - 1 for step in drafts)
    assert counters.accepted == sum(min(step.accepted, len(step.tokens)) for step in drafts) > 0
    assert sum(counters.accepted_by_depth.values()) == counters.accepted and min(counters.accepted_by_depth) == 1
    assert counters.lengths.cumulative[-1] == len(steps) and counters.lengths.sum == counters.tokens
    assert 0 < counters.draft_passes <= sum(step.draft_passes for step in steps)


def test_times_are_those_of_the_requests(served: tuple[Counters, list[Request], list[Use]]) -> None:
    counters, requests, _ = served
    assert counters.first_token.cumulative[-1] == 3
    assert counters.first_token.sum == pytest.approx(sum(each.times[0] for each in requests), abs=0.1)
    later = sum(len(step.tokens) for each in requests for step in each.steps[1:])
    assert counters.between_tokens.cumulative[-1] == later  # each token counts once
    decoding = sum(each.times[-1] - each.times[0] for each in requests)
    assert counters.between_tokens.sum == pytest.approx(decoding, abs=0.1)
    assert ended(counters) == {"length": 3}


def test_memory_and_budget_are_those_of_the_last_round(served: tuple[Counters, list[Request], list[Use]]) -> None:
    first, last = served[2][0], served[2][-1]
    assert first.memory is not None and 0.5 < first.memory <= 1 and last.memory == 0
    assert first.budget is not None and (first.budget.passes, first.budget.k) == (2, 2)


def test_endings_and_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "ADMISSION_TOKENS", 0)
    made = engine()
    scheduler = Scheduler(runner(made, memory(made, 2, 12)), 8)
    late, cancelled, failing = request(made, 0, deadline=1e-6), request(made, 1), request(made, 2, criteria=(_fail,))
    others = [request(made, number) for number in (3, 4)]
    cancelled.cancelled = True
    time.sleep(0.001)
    for each in (late, cancelled, failing, *others):
        scheduler.submit(each)
    finish(scheduler)
    counters = scheduler.counters
    assert ended(counters) == {"length": 2, "deadline": 1, "cancelled": 1, counting.FAILED: 1}
    assert counters.preemptions > 0
    assert counters.prompt_tokens == 18  # of those that began; a preempted one counts once


def _fail(*_: object, **__: object) -> bool:
    raise ValueError("no")


def test_of_two_runners_the_fuller_memory_counts() -> None:
    budget = Sizes(passes=1, width=1, k=1, rows=4)
    for one, other, both in (
        (Use(0.2), Use(0.7, budget), Use(0.7, budget)),
        (Use(0.2, budget), Use(None), Use(0.2, budget)),
        (Use(), Use(), Use()),
    ):
        first, second = (cast(Any, SimpleNamespace(use=each, join=lambda new: None)) for each in (one, other))
        runner = SplitRunner(first, second, lambda sequence: False)
        assert runner.use == one  # nothing runs in the second
        runner.join([cast(Any, object())])
        assert runner.use == both


def test_an_engine_counts_across_its_threads() -> None:
    made = engine()
    before = made.counters.prompt_tokens
    for number in range(2):  # the thread ends when nothing is left
        made.submit([1, 2, 3, number], max_new_tokens=2).result(20)
    assert made.counters.prompt_tokens == before + 8 and (made.running, made.waiting) == (0, 0)
