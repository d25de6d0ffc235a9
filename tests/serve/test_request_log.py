"""The log of requests: one line for each, with numbers and without prompts, texts or keys."""

from __future__ import annotations

import json
import logging
import socket
from typing import Any

import httpx
import pytest

from helpers.scheduling import held
from helpers.serving import MODEL, engine, http, new_engine, running, wait_for
from windfall.core.errors import InputError
from windfall.engine.engine import Engine
from windfall.serve import log_format
from windfall.serve.settings import Settings

BODY = {"model": MODEL, "prompt": "SecretPrompt", "max_tokens": 12, "ignore_eos": True, "seed": 1}
FIELDS = {"time", "level", "event", "request_id", "method", "route", "status", "seconds"}
OF_TEXTS = {"texts", "prompt_tokens", "completion_tokens", "finish_reason", "ttft_seconds", "accepted_length"}


OWN = {"X-Request-Id": "own"}


def own_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The object on stdout about the request with the id of OWN; servers of other tests may log the end of theirs."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        found.extend(line for line in shown if line["request_id"] == "own")
        return bool(found)

    wait_for(there)
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_has_the_numbers_of_the_request(capsys: pytest.CaptureFixture[str], stream: bool) -> None:
    with log_format.logging_as("json"), running(engine()) as url:
        answer = http().post(f"{url}/v1/completions", json={**BODY, "stream": stream, "n": 2}, headers=OWN)
        line = own_line(capsys)
    assert {*line} == FIELDS | OF_TEXTS
    assert line["request_id"] == answer.headers["x-request-id"]
    assert (line["level"], line["event"], line["method"]) == ("info", "request", "POST")
    assert (line["route"], line["status"], line["texts"]) == ("/v1/completions", 200, 2)
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reason"]) == (12, 24, "length")
    assert 0 < line["ttft_seconds"] < line["seconds"] and 1 <= line["accepted_length"] <= 3


def test_no_prompt_text_key_or_path_is_logged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, chat = {"Authorization": "Bearer SecretKey"}, {"messages": [{"role": "user", "content": "SecretPrompt"}]}
    for form in ("text", "json"):
        with log_format.logging_as(form), running(engine(), Settings(api_keys=("SecretKey",))) as url:
            text = http().post(f"{url}/v1/completions", json=BODY, headers=key).json()["choices"][0]["text"]
            http().post(f"{url}/v1/chat/completions", json=chat, headers=key)
            http().post(f"{url}/v1/chat/completions?SecretQuery", json=chat, headers={"Authorization": "SecretKey"})
            http().post(f"{url}/v1/completions", json={**BODY, "SecretField": 1}, headers=key)
            http().get(f"{url}/v1/models/SecretName", headers=key)
            http().get(f"{url}/SecretPath", headers=key)
            http().request("SECRETMETHOD", f"{url}/v1/models", headers=key)
        shown = "".join(capsys.readouterr())
        assert shown.count("\n") == 7 and "Secret" not in shown and "SECRET" not in shown and text not in shown


def test_ids_of_clients_are_kept_if_they_are_harmless(
    address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http().get(f"{address}/health", headers={"X-Request-Id": "abc-1.2"}).headers["x-request-id"] == "abc-1.2"
    for wrong in ("", "a b", "a" * 129, 'a"b'):
        own = http().get(f"{address}/health", headers={"X-Request-Id": wrong}).headers["x-request-id"]
        assert len(own) == 32 and own != wrong

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("no")

    monkeypatch.setattr(Engine, "submit_ids", fail)
    caplog.handler.setFormatter(log_format.JsonLines())
    answer = http().post(f"{address}/v1/completions", json=BODY, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "mine"
    line = json.loads(caplog.text)
    assert line["request_id"] == "mine" and line["level"] == "error" and "KeyError" in line["message"]


def test_probes_are_logged_only_if_they_fail(capsys: pytest.CaptureFixture[str]) -> None:
    with log_format.logging_as("text"), running(engine(), Settings(api_keys=("key",))) as url:
        for path in ("/health", "/ready", "/metrics"):
            http().get(url + path)
    shown = [line for line in capsys.readouterr().out.splitlines() if " GET " in line]  # other servers may log an end
    assert len(shown) == 1 and " GET none 401 request_id=" in shown[0], shown


def test_a_client_that_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    made = new_engine()
    gate, _ = held(made)
    try:
        with log_format.logging_as("json"), running(made) as url:
            for stream in (False, True):
                with pytest.raises(httpx.ReadTimeout):
                    http().post(f"{url}/v1/completions", json={**BODY, "stream": stream}, headers=OWN, timeout=0.5)
                line = own_line(capsys)
                assert line["status"] == (200 if stream else 499)
                assert (line["finish_reason"], line["completion_tokens"]) == ("cancelled", 0)
                assert line["ttft_seconds"] is line["accepted_length"] is None
            gate.open.set()
    finally:
        gate.open.set()
        made.close()


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_client_that_leaves_while_it_sends_its_request(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, route: str
) -> None:
    head = f"POST {route} HTTP/1.1\r\nHost: a\r\nX-Request-Id: own\r\nContent-Type: application/json\r\n"
    with log_format.logging_as("json"), running(engine()) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(f'{head}Content-Length: 1000\r\n\r\n{{"prompt": "H'.encode())
        line = own_line(capsys)
        assert f'windfall:http_requests_total{{route="{route}",status="499"}} 1.0' in http().get(f"{url}/metrics").text
    assert (line["route"], line["status"], line["level"]) == (route, 499, "info") and not caplog.records


def test_none_logs_only_problems(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("no")

    with log_format.logging_as("none"), running(engine()) as url:
        http().post(f"{url}/v1/completions", json=BODY)
        monkeypatch.setattr(Engine, "submit_ids", fail)
        http().post(f"{url}/v1/completions", json=BODY)
    out, error = capsys.readouterr()
    assert out == "" and " ERROR a request failed: KeyError: 'no' request_id=" in error and error.count("\n") == 1


def test_the_loggers_are_as_before() -> None:
    names = (log_format.REQUESTS, *log_format.OTHERS)
    before = [(each.level, each.propagate, [*each.handlers]) for each in map(logging.getLogger, names)]
    with log_format.logging_as("json"):
        pass
    assert [(each.level, each.propagate, [*each.handlers]) for each in map(logging.getLogger, names)] == before
    with pytest.raises(InputError, match="--log-format takes text, json or none, not 'xml'"):
        log_format.check("xml")
