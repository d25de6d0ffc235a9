"""A client whose connection breaks sends the tokens that it has, and gets the rest of the same text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.serving import drafting_engine, http, running

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
COMPLETION = {"prompt": "Hi", "max_tokens": 20, "frequency_penalty": 0.5}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
HOW = {"seed": 5, "temperature": 1, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running(drafting_engine()) as url:
        yield url


def events(address: str, path: str, **more: Any) -> list[tuple[str, list[int]]]:
    """The texts of a stream, with the ids that come with them."""
    body, found = {**BODIES[path], **HOW, "stream": True, **more}, []
    with http().stream("POST", f"{address}{path}", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line and not line.endswith("[DONE]"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                found.append((text, choice["token_ids"] or []))
    return found


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_goes_on_after_any_event(address: str, path: str) -> None:
    whole = events(address, path)
    ids = [token for _, own in whole for token in own]
    assert len(ids) == 20 and len(whole) < 20
    for place in range(len(whole)):
        had = [token for _, own in whole[:place] for token in own]
        rest = events(address, path, resume_token_ids=had)
        assert had + [token for _, own in rest for token in own] == ids
        assert "".join(text for text, _ in [*whole[:place], *rest]) == "".join(text for text, _ in whole)


@pytest.mark.parametrize("path", BODIES)
def test_whole_answers_have_the_ids(address: str, path: str) -> None:
    body = {**BODIES[path], **HOW}
    first = http().post(f"{address}{path}", json=body).json()
    ids = first["choices"][0]["token_ids"]
    assert len(ids) == 20
    rest = http().post(f"{address}{path}", json={**body, "resume_token_ids": ids[:8]}).json()
    assert rest["choices"][0]["token_ids"] == ids[8:]
    assert rest["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert rest["usage"]["completion_tokens"] == 12
    without = http().post(f"{address}{path}", json={**body, "return_token_ids": False}).json()
    assert without["choices"][0]["token_ids"] is None
    ended = http().post(f"{address}{path}", json={**body, "resume_token_ids": ids}).json()
    assert ended["choices"][0]["finish_reason"] == "length" and ended["choices"][0]["token_ids"] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n": 2}, "continues one text; this request asks for 2"),
        ({"prompt": ["Hi", "Ho"]}, "continues one text; this request asks for 2"),
        ({"echo": True}, "exclude each other"),
        ({"seed": None}, "needs the seed that the text began with, or temperature 0"),
        ({"resume_token_ids": [61]}, "resume_token_ids takes token ids between 0 and 60"),
        ({"resume_token_ids": [1] * 21}, "the text ends after 20 of the 21 tokens"),
        ({"resume_token_ids": "a"}, "valid array"),
    ],
)
def test_what_cannot_go_on_is_refused(address: str, change: dict[str, Any], words: str) -> None:
    answer = http().post(f"{address}/v1/completions", json={**COMPLETION, **HOW, "resume_token_ids": [1], **change})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_an_answer_that_may_call_tools_is_refused(address: str) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    body = {**CHAT, **HOW, "resume_token_ids": [1], "tools": tools}
    answer = http().post(f"{address}/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "may call tools" in answer.json()["error"]["message"]
