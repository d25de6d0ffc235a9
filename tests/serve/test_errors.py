"""What the server refuses, and how it says so."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from helpers.scheduling import held
from helpers.serving import MODEL, client, drafting_engine, engine, http, new_engine, running, wait_for
from windfall.core.errors import InputError
from windfall.engine.engine import Engine
from windfall.engine.host_runner import HostRunner
from windfall.engine.request import Handle
from windfall.serve.settings import Settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
KEYS = ("first key", "sécond")


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert "Traceback" not in answer.text
    (error,) = answer.json().values()
    assert {*error} == {"message", "type", "param", "code"} and error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "change", "param", "words"),
    [
        (COMPLETIONS, {"suffix": "end"}, "suffix", "not supported yet"),
        (COMPLETIONS, {"best_of": 3}, "best_of", "not supported yet"),
        (CHAT, {"colour": "blue"}, "colour", "'colour' is not supported"),
        (CHAT, {"prompt": "Hi"}, "prompt", "'prompt' is not supported"),
        (CHAT, {"messages": None}, "messages", "'messages' is required"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "", "refusal": "no"}]},
            "messages.0.refusal",
            "not s",
        ),
        (CHAT, {"temperature": "hot"}, "temperature", "number"),
        (CHAT, {"temperature": -1}, "temperature", "greater than or equal to 0"),
        (CHAT, {"top_p": 0}, "top_p", "greater than 0"),
        (CHAT, {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (CHAT, {"max_tokens": True}, "max_tokens", "integer"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, None, "give one of them"),
        (CHAT, {"n": 1000}, "n", "less than or equal to 128"),
        (CHAT, {"n": 100}, None, "asks for 100 texts at once; this server takes at most 68"),
        (CHAT, {"stop": ""}, "stop", "not empty"),
        (CHAT, {"stop": 3}, "stop", "array"),
        (CHAT, {"seed": 2**64}, "seed", "less than"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        (CHAT, {"logit_bias": {"99999": 1}}, None, "logit_bias takes token ids"),
        (CHAT, {"frequency_penalty": 1e31}, None, "frequency_penalty must lie"),
        (CHAT, {"stream_options": {"include_usage": True}}, None, "needs stream"),
        (CHAT, {"stream": True, "stream_options": {"every": 1}}, "stream_options.every", "not supported"),
        (COMPLETIONS, {"prompt": ""}, None, "the prompt is empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "must be text"),
        (COMPLETIONS, {"prompt": ["Hi", 3]}, "prompt", "must be text"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "must be text"),
        (COMPLETIONS, {"prompt": [10**6]}, None, "token ids must be between"),
        (COMPLETIONS, {"prompt": [10**6], "echo": True}, None, "token ids must be between"),
        (COMPLETIONS, {"prompt": "a" * 100}, None, "takes 95 at most"),
    ],
)
def test_wrong_fields(address: str, path: str, change: dict[str, Any], param: str | None, words: str) -> None:
    fields = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    answer = http().post(address + path, json={"model": MODEL, **fields, **change})
    error = error_of(answer)
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 5000])
def test_bodies_that_are_not_json_objects(address: str, body: bytes) -> None:
    answer = http().post(address + COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "JSON" in error_of(answer)["message"]


def test_other_content_types_are_refused(address: str) -> None:
    answer = http().post(address + COMPLETIONS, content=b'{"prompt": "Hi"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415 and "application/json" in error_of(answer)["message"]


def test_the_clients_errors(api: openai.OpenAI) -> None:
    messages: Any = MESSAGES
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs to be true"):
        api.chat.completions.create(model=MODEL, messages=messages, top_logprobs=2)
    with pytest.raises(openai.NotFoundError, match="'other' does not exist; this server has 'tiny'"):
        api.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("some/other")


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
def test_a_model_without_a_chat_template_refuses_chat(more: dict[str, Any]) -> None:
    with running(drafting_engine(chats=False)) as url:
        answer = http().post(url + CHAT, json={"messages": MESSAGES, **more})
    words = f"{MODEL} has no chat template; send the text as `prompt` to /v1/completions"
    assert answer.status_code == 400 and error_of(answer)["message"] == words


def test_unknown_paths_and_methods(address: str) -> None:
    missing, wrong = http().get(f"{address}/v1/nothing"), http().get(address + CHAT)
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert "not found" in error_of(missing)["message"] and "not allowed" in error_of(wrong)["message"]


def test_an_internal_failure_tells_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr(Engine, "submit_ids", fail)
    answer = http().post(address + COMPLETIONS, json={"prompt": "Hi"})
    error = error_of(answer)
    assert answer.status_code == 500 and error["type"] == "server_error" and "secret" not in answer.text
    assert "a request failed: KeyError: 'a secret'" in caplog.text and "Traceback" not in caplog.text


def test_a_failure_in_the_middle_of_a_stream_is_an_event(api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, usual = iter(range(3)), HostRunner.round

    def failing(self: HostRunner) -> Any:
        if next(rounds, None) is None:
            raise MemoryError("a secret")
        return usual(self)

    monkeypatch.setattr(HostRunner, "round", failing)
    chunks = api.completions.create(model=MODEL, prompt="Hi", seed=1, stream=True)
    assert next(chunks).choices[0].text
    with pytest.raises(openai.APIError, match="failed to answer") as caught:
        list(chunks)
    assert "secret" not in str(caught.value)


# ---- limits


def test_a_full_queue_is_answered_with_429() -> None:
    made = new_engine(max_requests=1)
    gate, _ = held(made)
    try:
        with running(made, Settings(max_queue=0)) as url, client(url) as api:
            how: Any = {"model": MODEL, "prompt": "Hi", "extra_body": {"ignore_eos": True}}
            with api.completions.create(stream=True, **how) as stream:
                assert http().get(f"{url}/ready").json() == {"status": "ready", "running": 1, "waiting": 0}
                with pytest.raises(openai.RateLimitError, match="try again later") as caught:
                    api.completions.create(**how)
                assert int(caught.value.response.headers["retry-after"]) > 0
                gate.open.set()
                assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
            assert api.completions.create(**how).choices  # there is room again
    finally:
        gate.open.set()
        made.close()


def chunked(size: int) -> Iterator[bytes]:
    yield b'{"prompt": "'
    for _ in range(size // 100):
        yield b"a" * 100
    yield b'"}'


def test_large_bodies_are_refused() -> None:
    with running(engine(), Settings(max_body_bytes=1000)) as url:
        announced = http().post(url + COMPLETIONS, json={"prompt": "a" * 1000})
        headers = {"Content-Type": "application/json"}
        counted = http().post(url + COMPLETIONS, content=chunked(2000), headers=headers)
        assert (announced.status_code, counted.status_code) == (413, 413)
        assert error_of(announced) == error_of(counted)
        assert http().post(url + COMPLETIONS, json={"prompt": "a" * 90}).status_code == 200


def test_keys() -> None:
    with running(engine(), Settings("org/served", KEYS)) as url:
        for key in KEYS:
            answer = http().get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}".encode()})
            assert answer.json()["data"][0]["id"] == "org/served"
        with client(url, "first") as wrong, pytest.raises(openai.AuthenticationError, match="API key"):
            wrong.completions.create(model="org/served", prompt="Hi")
        with client(url, KEYS[0]) as right:
            assert right.models.retrieve("org/served").id == "org/served"
        for header in ({}, {"Authorization": KEYS[0]}, {"Authorization": f"Basic {KEYS[0]}"}):
            answer = http().post(url + CHAT, headers=header, json={})
            assert answer.status_code == 401 and error_of(answer)["code"] == "invalid_api_key"
        assert http().get(f"{url}/health").json() == {"status": "ok"} and http().get(f"{url}/ready").status_code == 200


@pytest.mark.parametrize(
    "wrong",
    [{"model_name": " "}, {"api_keys": ("",)}, {"max_queue": -1}, {"request_timeout": 0}, {"max_body_bytes": 0}],
)
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Settings(**wrong)


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(Settings(api_keys=("secret",)))


def test_a_request_that_failed_is_released_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the garbage collection, which would have to find a cycle of its error, traceback and texts."""
    made: list[weakref.ref[Handle]] = []
    usual = Engine.submit_ids

    def submit(self: Engine, *given: Any, **named: Any) -> Handle:
        handle = usual(self, *given, **named, processors=(fail,))
        made.append(weakref.ref(handle))
        return handle

    def fail(*_: Any) -> Any:
        raise KeyError("no")

    monkeypatch.setattr(Engine, "submit_ids", submit)
    gc.collect()
    gc.disable()
    try:
        for stream in (False, True):
            answer = http().post(address + COMPLETIONS, json={"prompt": "Hi", "stream": stream})
            assert "server_error" in answer.text
        http().get(f"{address}/ready")  # counts the texts again, and the connection has another request
        wait_for(lambda: [handle() for handle in made] == [None, None])
    finally:
        gc.enable()
