"""`Engine.submit`: handles, threads, asyncio, and requests beside the other methods."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import weakref
from functools import cache
from typing import Any

import pytest
import torch

from helpers.random_parallel import some_drafter
from helpers.scheduling import alone, held
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import InputError, Step
from windfall.engine.engine import Engine
from windfall.engine.memory import as_bytes, default_bytes
from windfall.model.target import Target

HOW: dict[str, Any] = {"max_new_tokens": 12}


@cache
def engine() -> Engine:
    target = Target(tiny(num_hidden_layers=2))
    return Engine(target, some_drafter("ngram"), registry.policy("chain", depth=2), max_requests=3)


def ids(steps: Any) -> list[int]:
    return [token for step in steps for token in step.tokens]


# ---- handles


def test_a_handle_gives_steps_and_the_generation() -> None:
    handle = engine().submit(prompt(9, 1), temperature=0.9, **HOW)
    steps = list(handle)
    done = handle.result()
    assert handle.done and ids(steps) == done.token_ids == ids(handle)  # a second time, too
    assert done.finish_reason == steps[-1].finish == "length"
    assert (handle.prompt_tokens, handle.seed) == (9, done.seed) == (done.prompt_tokens, done.stats.seed)
    assert engine().generate(prompt(9, 1), temperature=0.9, seed=handle.seed, **HOW).token_ids == done.token_ids
    assert 0 < done.stats.ttft <= done.stats.seconds and done.stats.prefill > 0
    assert engine().submit(prompt(), **HOW).id > handle.id


def test_each_request_has_its_own_policy() -> None:
    one, other = (engine().submit(prompt(), policy=policy, **HOW) for policy in ("none", registry.policy("beam", k=3)))
    assert one.result().token_ids == other.result().token_ids == alone(engine(), 0)
    assert one.result().stats.draft_passes == 0 < other.result().stats.draft_passes


def test_cancelling_waiting_and_running_requests() -> None:
    gate, first = held(engine())
    others = [engine().submit(prompt(9, i), **HOW) for i in range(1, 5)]
    for handle in (first, others[0], others[3]):
        handle.cancel()
    with pytest.raises(TimeoutError, match="has not ended within"):
        first.result(0.01)
    gate.open.set()
    assert [handle.result(30).finish_reason for handle in (first, others[0], others[3])] == ["cancelled"] * 3
    assert [others[i].result(30).token_ids for i in (1, 2)] == [alone(engine(), i) for i in (2, 3)]
    assert len(list(first)) == 1 and list(others[3]) == []


def test_a_deadline() -> None:
    gate, first = held(engine())
    late = engine().submit(prompt(), deadline=0.01, **HOW)
    time.sleep(0.02)
    gate.open.set()
    assert late.result(30).finish_reason == "deadline" and first.result(30).finish_reason == "length"


def test_a_failing_request_raises_from_its_handle_only() -> None:
    def broken(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    wrong, right = engine().submit(prompt(), processors=(broken,), **HOW), engine().submit(prompt(), **HOW)
    for call in (wrong.result, lambda: list(wrong), lambda: asyncio.run(awaited(wrong))):
        with pytest.raises(KeyError, match="mine"):
            call()
    assert right.result().token_ids == alone(engine(), 0)


async def awaited(handle: Any) -> Any:
    return await handle


def test_a_callback_is_called_at_the_end_and_its_errors_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    called = list[int]()
    gate, handle = held(engine())
    handle.add_done_callback(lambda done: 1 / 0)
    handle.add_done_callback(lambda done: called.append(done.id))
    gate.open.set()
    handle.result(30)
    engine().submit(prompt(), **HOW).result(30)
    handle.add_done_callback(lambda done: called.append(-done.id))
    assert called == [handle.id, -handle.id]
    assert "callback of request" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"deadline": 0}, "deadline takes a number of seconds above 0, not 0"),
        ({"deadline": "soon"}, "deadline takes a number of seconds above 0, not 'soon'"),
        ({"policy": 3}, "a policy is a name or a TreePolicy, not 3"),
        ({"policy": "nonsense"}, "there is no policy 'nonsense'"),
        ({"heat": 3}, "there is no sampling option 'heat'"),
    ],
)
def test_bad_input_is_refused_at_once(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine().submit(prompt(), **words)


# ---- asyncio


def test_handles_in_asyncio() -> None:
    async def stream(handle: Any) -> list[int]:
        return [token async for step in handle for token in step.tokens]

    async def main() -> list[list[int]]:
        handles = [engine().submit(prompt(9, i), **HOW) for i in range(6)]
        whole = [awaited(handle) for handle in handles[:3]]
        done = await asyncio.gather(*whole, *map(stream, handles[3:]))
        return [each.token_ids for each in done[:3]] + done[3:]

    assert asyncio.run(main()) == [alone(engine(), i) for i in range(6)]


def test_cancelling_the_task_that_waits_cancels_the_request() -> None:
    async def main() -> Any:
        gate, handle = await asyncio.to_thread(held, engine())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(awaited(handle), 0.01)
        gate.open.set()
        return await handle

    assert asyncio.run(main()).finish_reason == "cancelled"


# ---- threads, and the other methods


def test_many_threads_submit_and_generate_at_once() -> None:
    wanted, found = [alone(engine(), i) for i in range(12)], dict[int, list[int]]()
    other = Engine(engine().target, some_drafter("ngram"), registry.policy("none"))

    def work(i: int) -> None:
        ways = [
            lambda: engine().submit(prompt(9, i), **HOW).result(60),
            lambda: engine().generate(prompt(9, i), **HOW),
            lambda: engine().generate_batch([prompt(9, i), prompt(3)], **HOW)[0],
            lambda: other.generate(prompt(9, i), **HOW),  # on the same target
        ]
        found[i] = ways[i % 4]().token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found[i] for i in range(12)] == wanted


def test_while_requests_run_the_other_methods_become_requests() -> None:
    gate, first = held(engine())
    threading.Timer(0.05, gate.open.set).start()
    seen = list[Step]()
    assert engine().generate(prompt(9, 1), on_step=seen.append, **HOW).token_ids == alone(engine(), 1) == ids(seen)
    first.result(30)
    gate, first = held(engine())
    stream = engine().stream(prompt(9, 2), **HOW)
    threading.Timer(0.05, gate.open.set).start()
    assert ids(stream) == alone(engine(), 2)
    gate, first = held(engine())
    threading.Timer(0.05, gate.open.set).start()
    together = engine().generate_batch([prompt(9, i) for i in range(5)], **HOW)
    assert [each.token_ids for each in together] == [alone(engine(), i) for i in range(5)]


def test_asyncio_beside_requests() -> None:
    async def main() -> list[list[int]]:
        gate, first = await asyncio.to_thread(held, engine())
        threading.Timer(0.05, gate.open.set).start()
        steps = [step async for step in engine().astream(prompt(9, 3), **HOW)]
        return [ids(steps), (await engine().agenerate(prompt(9, 4), **HOW)).token_ids, (await first).token_ids]

    assert asyncio.run(main()) == [alone(engine(), i) for i in (3, 4, 0)]


def test_an_error_in_on_step_cancels_the_request() -> None:
    gate, first = held(engine())
    threading.Timer(0.05, gate.open.set).start()
    with pytest.raises(ZeroDivisionError):
        engine().generate(prompt(9, 1), on_step=lambda step: 1 / 0, **HOW)
    assert first.result(30).token_ids == alone(engine(), 0)


def test_a_request_ends_a_stream_that_began_before() -> None:
    stream = engine().stream(prompt(), **HOW)
    next(stream)
    assert engine().submit(prompt(9, 1), **HOW).result(30).token_ids == alone(engine(), 1)
    with pytest.raises(RuntimeError, match="another generation has begun"):
        next(stream)


def test_another_engine_on_the_target_makes_requests_start_again() -> None:
    other = Engine(engine().target, some_drafter("ngram"), registry.policy("none"))
    gate, first = held(engine())
    thread = threading.Thread(target=lambda: other.generate(prompt(9, 5), **HOW))
    thread.start()
    gate.open.set()
    assert first.result(30).token_ids == alone(engine(), 0)
    thread.join(30)


def test_generate_batch_takes_any_number_of_prompts() -> None:
    done = engine().generate_batch([prompt(9, i) for i in range(8)], **HOW)
    assert [each.token_ids for each in done] == [alone(engine(), i) for i in range(8)]
    assert not engine()._service.busy


def test_an_interrupted_batch_leaves_the_engine_usable() -> None:
    def interrupt(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if prefix.shape[1] > 11:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        engine().generate_batch([prompt(9, i) for i in range(5)], processors=(interrupt,), **HOW)
    assert engine().target.decoder.lengths == []
    assert engine().generate_batch([prompt()] * 2, **HOW)[1].token_ids == alone(engine(), 0)


def test_a_batch_ends_with_the_first_error() -> None:
    def broken(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        engine().generate_batch([prompt(), prompt()], processors=(broken,), **HOW)


# ---- the end of an engine


def test_closing_cancels_and_refuses_more() -> None:
    with Engine(engine().target, some_drafter("ngram"), registry.policy("none")) as made:
        gate, first = held(made)
        second = made.submit(prompt(), **HOW)
        threading.Timer(0.05, gate.open.set).start()
    assert [each.result(0).finish_reason for each in (first, second)] == ["cancelled"] * 2
    assert not made._service.busy
    with pytest.raises(RuntimeError, match="closed"):
        made.submit(prompt())
    assert made.generate(prompt(), **HOW).token_ids == alone(engine(), 0)
    made.close()  # a second time


def test_the_thread_ends_when_there_is_nothing_to_do() -> None:
    engine().submit(prompt(), **HOW).result()
    for _ in range(500):
        if not engine()._service.busy:
            return
        time.sleep(0.01)
    raise AssertionError("the thread still runs")


def test_a_runner_that_breaks_fails_its_requests_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, first = held(engine())
    monkeypatch.setattr(type(engine().drafter), "retain", lambda *_: 1 / 0)
    second = engine().submit(prompt(), max_new_tokens=2)  # it leaves first
    gate.open.set()
    with pytest.raises(ZeroDivisionError):
        first.result(30)
    monkeypatch.undo()
    assert second.done
    assert engine().submit(prompt(), **HOW).result(30).token_ids == alone(engine(), 0)


def test_an_error_in_the_last_round_of_a_request_reaches_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: Step) -> Any:
        raise ValueError("no counts")

    made = Engine(Target(tiny()), some_drafter("ngram"), registry.policy("none"))
    monkeypatch.setattr(Step, "counts", property(fail))
    with pytest.raises(ValueError, match="no counts"):
        made.submit(prompt(), max_new_tokens=1).result(20)


def test_an_engine_is_freed_at_once_when_it_is_no_longer_used() -> None:
    made = Engine(engine().target, some_drafter("ngram"), registry.policy("none"))
    made.submit(prompt(), **HOW).result()
    made.generate_batch([prompt(), prompt()], **HOW)
    while made._service.busy:
        time.sleep(0.01)
    gone, made = weakref.ref(made), None
    assert gone() is None


def test_a_forgotten_engine_does_not_keep_the_process_alive() -> None:
    code = (
        "from helpers.tiny import *; import windfall; made = windfall.load(tiny(), 'ngram', 'none');"
        "handle = made.submit(prompt(), max_new_tokens=240); next(iter(handle)); print('end')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


# ---- memory


@pytest.mark.parametrize(
    ("given", "bytes"), [("4GB", 4 * 10**9), ("1.5 MiB", 3 * 2**19), ("512", 512), (7, 7), ("2tb", 2 * 10**12)]
)
def test_sizes_of_memory(given: Any, bytes: int) -> None:
    assert as_bytes(given) == bytes


@pytest.mark.parametrize("given", ["much", "4XB", "", "-1GB", 0, -5, True, [3], float("nan")])
def test_wrong_sizes_are_refused(given: Any) -> None:
    with pytest.raises(InputError, match="kv_memory takes a size such as 4GB"):
        as_bytes(given)


def test_the_default_is_a_share_of_the_free_memory() -> None:
    assert (default_bytes(torch.device("cpu")) or 0) > 2**20


def test_the_memory_of_an_engine_limits_its_requests() -> None:
    made = Engine(engine().target, some_drafter("ngram"), registry.policy("none"), kv_memory=40_000)
    with pytest.raises(InputError, match=r"the request needs room for 209 tokens .*but kv_memory holds \d+"):
        made.submit(prompt(), max_new_tokens=200)
    assert made.submit(prompt(), **HOW).result(30).token_ids == alone(engine(), 0)
    for wrong in (0, 1.5, "8", True):
        with pytest.raises(InputError, match="max_requests must be a whole number of at least 1"):
            Engine(engine().target, some_drafter("ngram"), registry.policy("none"), max_requests=wrong)


def test_a_new_policy_gets_a_new_runner_when_the_thread_has_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Engine(engine().target, some_drafter("ngram"), registry.policy("chain", depth=2))
    runners, later, over, make = list[Any](), list[Any](), threading.Event(), made._batch_runner
    monkeypatch.setattr(made, "_batch_runner", lambda: runners.append(make()) or runners[-1])

    def go_on(_: Any) -> None:
        """Called by the thread, which has no request left."""
        later.append(made.submit(prompt(), **HOW))
        later[0].add_done_callback(change)

    def change(_: Any) -> None:
        assert len(runners) == 1
        made.policy = registry.policy("none")
        later.append(made.submit(prompt(), **HOW))
        assert len(runners) == 2
        over.set()

    first = made.submit(prompt(), **HOW)
    first.add_done_callback(go_on)
    assert over.wait(30)
    texts = [handle.result(30) for handle in (first, *later)]
    assert texts[0].token_ids == texts[1].token_ids == texts[2].token_ids
    assert [text.stats.draft_passes > 0 for text in texts] == [True, True, False]
