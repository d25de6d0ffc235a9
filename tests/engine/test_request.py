"""Requests that many threads follow: no Step is missed, although adding one usually takes no lock."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import traceback
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from helpers.scheduling import engine
from helpers.tiny import prompt
from windfall.core.stats import Totals
from windfall.core.types import Step
from windfall.engine.loop_calls import call_in
from windfall.engine.request import Handle, Request
from windfall.engine.sequence import Sequence

STEPS = 300


def step(number: int, finish: str | None = None) -> Step:
    return cast(Step, SimpleNamespace(tokens=(number,), finish=finish, counts=(1, 2, 0, 1, 1)))


def request() -> Request:
    params = SimpleNamespace(seed=None)
    return Request(1, cast(Sequence, SimpleNamespace(prompt_length=len(prompt()), params=params)))


def fill(one: Request) -> None:
    """Add all Steps at irregular times."""
    for number in range(STEPS):
        one.put(step(number, "length" if number == STEPS - 1 else None), time.perf_counter())
        if number % 7 == 0:
            time.sleep(0.0003)


def tokens(steps: Any) -> list[int]:
    return [token for each in steps for token in each.tokens]


def test_threads_and_tasks_see_every_step() -> None:
    async def follow(one: Request) -> list[int]:
        return [token async for each in Handle(one) for token in each.tokens]

    for _ in range(5):
        one = request()
        with ThreadPoolExecutor() as pool:
            threads = [pool.submit(lambda own: tokens(Handle(own)), one) for _ in range(3)]
            tasks = pool.submit(lambda own: asyncio.run(follow(own)), one)
            fill(one)
            assert [thread.result(20) for thread in (*threads, tasks)] == [[*range(STEPS)]] * 4
        assert one.finish == "length" and len(one.times) == STEPS and one.times == sorted(one.times)


def test_steps_arrive_together_if_there_are_pauses() -> None:
    async def follow(one: Request, pause: float) -> list[list[int]]:
        return [tokens(steps) async for steps in Handle(one).arrivals(lambda: pause)]

    one = request()
    thread = threading.Thread(target=fill, args=[one])
    thread.start()
    found = asyncio.run(asyncio.wait_for(follow(one, 0.005), 20))
    thread.join()
    assert [token for each in found for token in each] == [*range(STEPS)] and len(found) < STEPS / 3

    last = request()
    last.put(step(0), time.perf_counter())
    timer = threading.Timer(0.05, lambda: last.put(step(1, "length"), time.perf_counter()))
    timer.start()
    assert asyncio.run(asyncio.wait_for(follow(last, 60.0), 20)) == [[0], [1]]  # the end is not waited for


def test_a_loop_makes_all_calls_in_order() -> None:
    async def receive() -> list[int]:
        loop, made, done = asyncio.get_running_loop(), list[int](), asyncio.Event()

        def send() -> None:
            for number in range(STEPS):
                call_in(loop, partial(made.append, number))
                if number % 50 == 0:
                    time.sleep(0.001)
            call_in(loop, done.set)

        thread = threading.Thread(target=send)
        thread.start()
        await asyncio.wait_for(done.wait(), 20)
        thread.join()
        return made

    assert asyncio.run(receive()) == [*range(STEPS)]


def test_a_loop_is_woken_once_for_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def count() -> int:
        loop, woken, made = asyncio.get_running_loop(), Counter[str](), list[int]()
        usual = loop.call_soon_threadsafe

        def counted(*given: Any) -> Any:
            woken["times"] += 1
            return usual(*given)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        for number in range(64):
            call_in(loop, partial(made.append, number))
        await asyncio.sleep(0.01)
        assert len(made) == 64
        return woken["times"]

    assert asyncio.run(count()) == 1


def test_a_closed_loop_is_ignored() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    call_in(loop, lambda: None)


def test_sums_over_the_steps_are_known_at_any_time() -> None:
    one = request()
    handle = Handle(one)
    assert handle.totals == Totals(0, 0, 0, 0, 0, 0) and handle.ttft is None
    one.put(step(0), one.created + 0.5)
    last = SimpleNamespace(tokens=(1, 2, 3), finish="length", counts=(3, 5, 2, 9, 1))
    one.put(cast(Step, last), one.created + 1.5)
    assert handle.totals == Totals(cycles=2, tokens=4, rows=7, accepted=2, drafted=10, draft_passes=2)
    assert handle.ttft == pytest.approx(0.5)


def test_a_request_that_fails_releases_the_logits_at_once() -> None:
    made, logits = engine(), list[weakref.ref[torch.Tensor]]()

    def fail(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        own = scores.clone()
        logits.extend(map(weakref.ref, (own, scores)))
        raise KeyError("no")

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(KeyError) as failed:
            made.submit(prompt(), processors=(fail,), max_new_tokens=4).result(20)
        assert [own() for own in logits] == [None, None]
        assert "in fail" in "".join(traceback.format_exception(failed.value))
    finally:
        gc.enable()
