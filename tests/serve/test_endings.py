"""How requests end early: disconnects, timeouts, and the end of the server."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from helpers.scheduling import held, memory
from helpers.serving import MODEL, Serving, engine, http, new_engine, wait_for
from windfall.engine.engine import Engine
from windfall.engine.handle import Handle
from windfall.serve.admission import Admission
from windfall.serve.backend import Job
from windfall.serve.settings import Settings

LONG = {"model": MODEL, "prompt": "Hi", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """The handles of all requests from now on."""
    made: list[Handle] = []
    usual = Engine.submit_ids

    def submit(self: Engine, *given: Any, **named: Any) -> Handle:
        made.append(usual(self, *given, **named))
        return made[-1]

    monkeypatch.setattr(Engine, "submit_ids", submit)
    return made


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels_the_texts(address: str, handles: list[Handle], stream: bool) -> None:
    gate, _ = held(engine())
    handles.clear()
    try:
        with pytest.raises(httpx.ReadTimeout):
            http().post(f"{address}/v1/completions", json={**LONG, "n": 2, "stream": stream}, timeout=1)
        wait_for(lambda: len(handles) == 2 and all(handle._request.cancelled for handle in handles))
    finally:
        gate.open.set()
    assert [handle.result(20).finish_reason for handle in handles] == ["cancelled"] * 2
    assert http().get(f"{address}/ready").json()["running"] == 0


def test_leaving_a_stream_cancels_the_text(api: openai.OpenAI, handles: list[Handle]) -> None:
    with api.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(stream)
    assert handles[0].result(20).finish_reason in ("cancelled", "length")


def test_a_caller_that_is_cancelled_while_it_submits_leaves_nothing() -> None:
    made = new_engine(max_requests=1)
    admission, entered, go_on = Admission(made, Settings()), threading.Event(), threading.Event()
    usual = made.submit_ids

    def slow(*given: Any, **named: Any) -> Handle:
        entered.set()
        assert go_on.wait(20)
        return usual(*given, **named)

    made.submit_ids = slow  # type: ignore[method-assign]
    job = Job([1, 2, 3], True, {"max_new_tokens": 200, "eos": ()})

    async def main() -> None:
        running, waiting = (asyncio.create_task(admission.submit([job])) for _ in range(2))
        await asyncio.to_thread(entered.wait, 20)
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        go_on.set()

    asyncio.run(main())
    wait_for(lambda: admission.places.taken == 0)
    made.close()


def test_a_refused_text_leaves_nothing(address: str) -> None:
    prompts = [[1, 2, 3], [10**6]]
    assert http().post(f"{address}/v1/completions", json={**LONG, "prompt": prompts}).status_code == 400
    wait_for(lambda: http().get(f"{address}/ready").json()["running"] == 0)


def test_a_small_memory_ends_texts_without_a_limit_early(serving: Serving) -> None:
    made = new_engine(kv_memory=memory(engine(), 1, 40))
    body = {"prompt": "a" * 30, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}
    with serving(made) as url:
        whole = http().post(f"{url}/v1/chat/completions", json=chat).json()
        assert whole["usage"]["total_tokens"] == 40 and whole["choices"][0]["finish_reason"] == "length"
        assert http().post(f"{url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 10
        refused = http().post(f"{url}/v1/completions", json={**body, "max_tokens": 11})
        assert refused.status_code == 400 and "needs room for 41 tokens" in refused.json()["error"]["message"]
        assert http().post(f"{url}/v1/completions", json={"prompt": "a" * 41}).status_code == 400
    made.close()


def test_a_timeout_cuts_the_text_off(serving: Serving) -> None:
    made = new_engine()
    gate, _ = held(made)
    with serving(made, Settings(request_timeout=0.1)) as url, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(http().post, f"{url}/v1/completions", json=LONG)
        wait_for(lambda: http().get(f"{url}/ready").json()["running"] == 1)
        threading.Timer(0.2, gate.open.set).start()
        choice = answer.result().json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
    made.close()


@pytest.mark.parametrize("stream", [False, True])
def test_running_requests_end_before_the_server(serving: Serving, stream: bool) -> None:
    made = new_engine()
    gate, _ = held(made)
    with ThreadPoolExecutor(1) as threads:
        with serving(made) as url:
            answer = threads.submit(http().post, f"{url}/v1/completions", json={**LONG, "stream": stream})
            wait_for(lambda: http().get(f"{url}/ready").json()["running"] == 1)
            threading.Timer(0.3, gate.open.set).start()
        assert answer.result(0.5).status_code == 200
        assert "length" in answer.result().text
    made.close()


def test_requests_that_outlast_the_limit_are_cancelled(serving: Serving, handles: list[Handle]) -> None:
    made = new_engine()
    gate, _ = held(made)
    handles.clear()
    with ThreadPoolExecutor(1) as threads:
        with serving(made, drain_seconds=1) as url:
            answer = threads.submit(http().post, f"{url}/v1/completions", json=LONG)
            wait_for(lambda: handles)
            started = time.monotonic()
        assert time.monotonic() - started < 10
        assert answer.result(5).status_code == 503
    gate.open.set()
    made.close()
    assert handles[0].result(5).finish_reason == "cancelled"


def test_closing_the_engine_ends_requests_with_an_error(serving: Serving) -> None:
    made = new_engine()
    gate, _ = held(made)
    with serving(made) as url, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(http().post, f"{url}/v1/completions", json=LONG)
        wait_for(lambda: http().get(f"{url}/ready").json()["running"] == 1)
        threading.Timer(0.2, gate.open.set).start()
        made.close()
        assert answer.result().status_code == 503
        assert answer.result().json()["error"]["message"] == "the server is shutting down"
        assert http().post(f"{url}/v1/completions", json=LONG).status_code == 503
        assert http().get(f"{url}/ready").status_code == 503
