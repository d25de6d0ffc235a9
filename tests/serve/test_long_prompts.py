"""Long prompts: refused without being tokenized if their size suffices, else tokenized apart from short ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from helpers.scheduling import held
from helpers.serving import bytes_engine, http, new_engine, running, wait_for
from windfall.core.errors import InputError
from windfall.engine.prompts import LONG_TEXT
from windfall.serve import prompt_threads
from windfall.serve.admission import Admission
from windfall.serve.backend import Job
from windfall.serve.errors import ApiError
from windfall.serve.prompt_threads import PromptThreads
from windfall.serve.settings import Settings

LONG = "a" * (LONG_TEXT + 1)
CHAT = {"messages": [{"role": "user", "content": LONG}]}


def post(address: str, path: str = "completions", **body: Any) -> httpx.Response:
    with httpx.Client(timeout=60) as own:
        return own.post(f"{address}/v1/{path}", json={"max_tokens": 2, **body})


def test_a_text_that_is_surely_too_long_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bytes_engine()
    tokenizer = made.target.tokenizer
    with pytest.raises(InputError, match=f"has {LONG_TEXT} tokens; tiny takes 95 at most"):
        made.encode("a" * LONG_TEXT, raw=True)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("this is tokenized")

    message = f"the prompt has at least {LONG_TEXT // 3 + 1} tokens; tiny takes 95 at most"  # "<end>" has three letters
    with running(made) as url:
        monkeypatch.setattr(type(tokenizer), "_encode_plus", fail)
        for path, body in (("completions", {"prompt": LONG}), ("chat/completions", CHAT)):
            answer = post(url, path, **body)
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    made.close()


def test_messages_that_the_template_leaves_out_do_not_count() -> None:
    made = bytes_engine()
    made.target.tokenizer.chat_template = "{{ messages[-1].content }}"
    assert made.encode([*CHAT["messages"], {"role": "user", "content": "abc"}]) == made.encode("abc", raw=True)


class Gated:
    """Work that waits until it may go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go_on.wait(20)


@pytest.fixture
def gate() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.go_on.set()


def test_short_requests_do_not_wait_for_a_long_prompt(gate: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_engine()
    usual = made.prompts.tokenize

    def slow(prompt: Any, *given: Any, **named: Any) -> list[int]:
        if LONG in str(prompt):
            gate()
        return usual(prompt, *given, **named)

    made.prompts.tokenize = slow  # type: ignore[method-assign]
    requests = [
        ("completions", {"prompt": LONG}),
        ("completions", {"prompt": ["a", LONG], "echo": True, "logprobs": 0}),
    ]
    requests += [("chat/completions", CHAT), ("../tokenize", {"prompt": LONG, "max_tokens": None})]
    with running(made) as url, ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(post, url, path, **body) for path, body in requests]
        assert gate.begun.wait(20)
        for _ in range(3):
            assert post(url, prompt="Hi").status_code == 200
        assert not any(answer.done() for answer in answers)
        gate.go_on.set()
        assert [answer.result().status_code for answer in answers] == [400, 400, 400, 200]
    made.close()


def test_too_many_long_prompts_are_refused(gate: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_threads, "MAX_WAITING", 3 * LONG_TEXT)
    threads = PromptThreads()
    size = LONG_TEXT + 1
    first, second = threads.submit(size, gate), threads.submit(size, int)
    with pytest.raises(ApiError, match="too many other long prompts") as refused:
        threads.submit(size, int)
    assert refused.value.status == 429 and refused.value.headers == {"Retry-After": "5"}
    assert threads.submit(LONG_TEXT, str).result(20) == "" and not second.done()
    assert second.cancel()  # the client has left
    third = threads.submit(size, int)
    gate.go_on.set()
    assert first.result(20) is None and third.result(20) == 0
    wait_for(lambda: threads._waiting == 0)
    assert threads.submit(10 * size, str).result(20) == ""  # alone


def test_a_refused_long_prompt_leaves_nothing(gate: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_threads, "MAX_WAITING", LONG_TEXT)
    made = new_engine(max_requests=1)
    usual = made.prompts.encode

    def slow(*given: Any, **named: Any) -> list[int]:
        gate()
        return usual(*given, **named)

    made.prompts.encode = slow  # type: ignore[method-assign]
    with running(made, Settings(max_queue=1)) as url, ThreadPoolExecutor(1) as threads:
        first = threads.submit(post, url, prompt=LONG)
        assert gate.begun.wait(20)
        for _ in range(3):  # the queue has one more place
            answer = post(url, prompt=LONG)
            assert answer.status_code == 429 and "long prompts" in answer.json()["error"]["message"]
        gate.go_on.set()
        assert first.result().status_code == 400
        assert http().get(f"{url}/ready").json() == {"status": "ready", "running": 0, "waiting": 0}
    made.close()


def test_texts_with_the_same_prompt_share_its_tokens() -> None:
    made = new_engine()
    admission, usual, encoded = Admission(made, Settings()), made.prompts.tokenize, list[Any]()
    made.prompts.tokenize = lambda prompt, *given, **named: encoded.append(prompt) or usual(prompt, *given, **named)  # type: ignore[method-assign]
    gate, _ = held(made)
    given = {"temperature": 1.0, "max_new_tokens": 2}
    jobs = [Job(prompt, True, {**given, "seed": seed}) for prompt in ("Hi", "Ho") for seed in range(3)]
    handles = asyncio.run(admission.submit(jobs))
    gate.open.set()
    texts = [handle.result(20).text for handle in handles]
    assert encoded == ["Hi", "Ho"]
    assert texts == [made.generate(job.prompt, raw=True, **job.sampling).text for job in jobs]
    made.close()
