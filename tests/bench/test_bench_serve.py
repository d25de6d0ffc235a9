"""`windfall bench serve`, against a small application and against windfall's own server."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from helpers.cli import refused, windfall
from helpers.serving import app_running, new_engine, running
from windfall.bench.serving import client as client_module
from windfall.bench.serving import load
from windfall.bench.serving.client import Outcome, base_url
from windfall.bench.serving.figures import figures, meets, percentiles
from windfall.bench.serving.workload import Level, Settings
from windfall.bench.tasks import Prompt
from windfall.cli import bench_serve
from windfall.core.errors import InputError
from windfall.serve.settings import Settings as ServerSettings

PROMPTS = [Prompt("talk", "", name, (f"tell me {name}",)) for name in ("a story", "more")]
ONE = ("--limit", 1, "--requests", 4, "--max-new-tokens", 4)


def other_server() -> FastAPI:
    """A server of another make: pieces of one token, usage only if it is asked for, and some failures."""
    app = FastAPI()
    app.state.bodies, app.state.now, app.state.most, app.state.usage = [], 0, 0, True

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [{"id": "other/model"}]}

    @app.post("/v1/completions")
    async def broken(request: Request) -> Response:
        bodies = app.state.bodies
        bodies.append(await request.json())
        kind = (len(bodies) - 1) % 4
        if kind == 1:
            return JSONResponse({"error": {"message": "busy"}}, 429)
        if kind == 2:
            return Response("data: {not json}\n\n", media_type="text/event-stream")
        if kind == 3:
            events = 'data: {"choices": [{"text": "a"}]}\n\n'  # and no end
            return Response(events, media_type="text/event-stream")
        return JSONResponse({"choices": [{"text": "abc"}], "usage": {"completion_tokens": 3, "prompt_tokens": 2}})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        app.state.bodies.append((await request.json(), request.headers.get("authorization")))
        usage = {"completion_tokens": 6, "prompt_tokens": 2}

        async def events() -> Any:
            app.state.now += 1
            app.state.most = max(app.state.most, app.state.now)
            yield ": a comment\n\n"
            yield _event(choices=[{"delta": {"role": "assistant", "content": ""}}])
            for _ in range(3):
                await asyncio.sleep(0.02)
                yield _event(choices=[{"delta": {"content": "ab"}}], usage=None)
            yield _event(choices=[{"delta": {}, "finish_reason": "stop"}])
            app.state.now -= 1
            yield _event(choices=[], usage=usage if app.state.usage else None)
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def _event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


@pytest.fixture(scope="module")
def other() -> Iterator[tuple[FastAPI, str]]:
    app = other_server()
    with app_running(app) as url:
        yield app, url


# ---- the command


def test_another_server(other: tuple[FastAPI, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app, url = other
    out = tmp_path / "new" / "load.json"
    monkeypatch.setenv("SOME_KEY", "SecretKey")
    options = ("--concurrency", "3,1", "--rate", "200", "--requests", 6, "--key-variable", "SOME_KEY", "--seed", 5)
    result = windfall(
        "bench", "serve", url, *options, "--limit", 2, "--ttft-ms", 10_000, "--tpot-ms", 0.01, "--out", out
    )
    assert result.exit_code == 0
    told = json.loads(out.read_text())
    assert "SecretKey" not in out.read_text() + result.output
    assert told["finished"] and (told["model"], told["server"]) == ("other/model", f"{url}/v1")
    assert [row["load"] for row in told["rows"]] == ["1 at once", "3 at once", "200/s"]
    assert app.state.most >= 3
    for row in told["rows"]:
        assert row["requests"] == 6 and row["complete"] and row["errors"] == {} and row["tokens"] == 36
        assert 0.02 <= row["ttft"]["p50"] <= row["ttft"]["p90"] <= row["ttft"]["p99"] < row["latency"]["p99"]
        assert row["tpot"]["p50"] == pytest.approx(0.04 / 5, rel=0.9)
        assert row["tokens_per_second"] == pytest.approx(36 / row["seconds"])
        assert row["goodput"] == row["goodput_share"] == 0  # 0.01 ms per token
    body, key = app.state.bodies[-1]
    assert key == "Bearer SecretKey" and body["stream_options"] == {"include_usage": True}
    assert body["messages"][0]["role"] == "user" and body["max_tokens"] == 128
    assert {each["seed"] for each, _ in app.state.bodies[-6:]} == set(range(5, 11))
    about = told["provenance"]
    assert url in result.stdout and about["versions"]["windfall"] and about["prompts"] and about["machine"]
    assert told["settings"]["tasks"] == ["builtin"] and told["settings"]["rates"] == [200]


def test_tokens_that_the_server_does_not_count(other: tuple[FastAPI, str], monkeypatch: pytest.MonkeyPatch) -> None:
    app, url = other
    monkeypatch.setattr(app.state, "usage", False)
    result = windfall("bench", "serve", url, "--concurrency", "1", *ONE)
    assert result.exit_code == 0 and "does not count tokens" in result.stdout


def test_errors_are_counted_by_kind(other: tuple[FastAPI, str]) -> None:
    app, url = other
    app.state.bodies.clear()
    at = (
        "bench",
        "serve",
        url,
        "--api",
        "completions",
        "--concurrency",
        "1",
        "--limit",
        1,
        "--requests",
        8,
        "--no-stream",
    )
    result = windfall(*at, "--warm-up", 0, "--json")
    (row,) = json.loads(result.stdout)["rows"]
    assert row["errors"] == {"status 429": 2, "unreadable answer": 2, "connection lost": 2}
    assert (row["requests"], row["tokens"], row["ttft"], row["goodput"]) == (8, 6, None, None)
    assert {*app.state.bodies[0]} == {"model", "prompt", "max_tokens", "temperature", "seed"}
    shown = windfall(*at, "--warm-up", 0).stdout
    assert "6 requests of 8 failed (2 × connection lost, 2 × status 429, 2 × unreadable answer)" in shown
    assert refused(*at, "--warm-up", 2).endswith("/v1 failed: status 429 (busy)")


def test_windfalls_own_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_engine()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "aaaa aaaa"}\n{"prompt": "Hi"}\n')
    monkeypatch.setenv("WINDFALL_API_KEY", "key")
    with running(made, ServerSettings(api_keys=("key",))) as url:
        at = (
            "bench",
            "serve",
            f"{url}/v1",
            "--concurrency",
            "4",
            "--requests",
            8,
            "--max-new-tokens",
            12,
            "--ignore-eos",
        )
        told = json.loads(windfall(*at, "--tasks", prompts, "--json").stdout)
        refusal = refused("bench", "serve", url, "--model", "no such", *ONE)
        monkeypatch.setenv("WINDFALL_API_KEY", "wrong")
        assert refused("bench", "serve", url).endswith("/v1/models answers with status 401")
    made.close()
    (row,) = told["rows"]
    assert told["model"] == "tiny" and row["errors"] == {} and row["tokens"] == 96 and row["tokens_counted"]
    assert row["accepted_length"] > 1 and row["prompt_tokens"] > 0
    assert "status 404 (the model 'no such' does not exist" in refusal
    assert "prompts.jsonl" in told["settings"]["tasks"][0] and str(tmp_path) not in json.dumps(told)


def test_ctrl_c_keeps_what_is_finished(
    other: tuple[FastAPI, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, send, sent = tmp_path / "load.json", client_module.Client.send, []

    async def stopping(self: Any, *given: Any) -> Outcome:
        sent.append(given)
        if len(sent) == 9:
            signal.raise_signal(signal.SIGINT)
        return await send(self, *given)

    monkeypatch.setattr(client_module.Client, "send", stopping)
    at = ("--concurrency", "2,1", "--limit", 1, "--requests", 6, "--warm-up", 0, "--out", out)
    result = windfall("bench", "serve", other[1], *at)
    assert result.exit_code == 130 and "finished measurements are kept" in result.stderr
    told = json.loads(out.read_text())
    assert not told["finished"] and [row["complete"] for row in told["rows"]] == [True, False]
    assert 1 <= told["rows"][1]["requests"] < 6 and "2 at once: stopped after" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "http://127.0.0.1:9/v1 --requests 1",
            "cannot reach http://127.0.0.1:9/v1: Connection refused; is the server running?",
        ),
        ("127.0.0.1:8000", "a server's address is a URL such as http://127.0.0.1:8000/v1, not '127.0.0.1:8000'"),
        ("http://me:secret@host", "give the key in an environment variable (--key-variable), not in the URL"),
        ("http://host --api chats", "--api takes chat or completions, not 'chats'"),
        ("http://host --concurrency 0", "--concurrency takes different numbers of clients, each at least 1"),
        ("http://host --concurrency two", "write --concurrency as numbers separated by commas, for example 1,8,32"),
        ("http://host --rate -1", "--rate takes different numbers of requests per second above 0"),
        ("http://host --rate nan", "--rate takes different numbers of requests per second above 0"),
        ("http://host --ttft-ms 0", "--ttft-ms takes a number above 0, not 0.0"),
        ("http://host --no-stream --ttft-ms 5", "--ttft-ms and --tpot-ms need streams"),
        ("http://host --temperature -1", "--temperature takes a number of at least 0, not -1.0"),
        ("http://host --key-variable NO_SUCH_KEY", "the environment variable NO_SUCH_KEY is not set"),
        ("http://host --tasks nothing", "there is no task 'nothing'"),
    ],
)
def test_bad_input_is_refused_in_one_line(options: str, message: str) -> None:
    assert message in refused("bench", "serve", *options.split())


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serve, "find_spec", lambda name: None)
    assert refused("bench", "serve", "http://host") == "the load test needs aiohttp; run: pip install windfall[serve]"


def test_no_answer_at_all_is_a_failure(other: tuple[FastAPI, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Any, *_: Any) -> Outcome:
        return Outcome(0.0, 1.0, error="timeout")

    monkeypatch.setattr(load.Client, "send", fail)
    at = ("bench", "serve", other[1], "--concurrency", "1", *ONE, "--warm-up", 0)
    assert windfall(*at).exit_code == 1


# ---- parts


def test_addresses() -> None:
    assert base_url("http://host:8000") == base_url("http://host:8000/v1/") == "http://host:8000/v1"
    assert base_url("https://host/some/api") == "https://host/some/api"
    for wrong in ("ftp://host", "http://", "http://host:99999", "http://host/v1?a=b", ""):
        with pytest.raises(InputError):
            base_url(wrong)


def test_arrivals_are_a_poisson_process() -> None:
    settings = Settings(rates=(4.0,), seed=3)
    times = settings.arrivals(Level(rate=4.0), 4000) or []
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.1)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)  # exponential gaps
    assert settings.arrivals(Level(rate=4.0), 4000) == times
    assert settings.arrivals(Level(rate=float("inf")), 2) == [0, 0] and settings.arrivals(Level(clients=2), 2) is None


def test_the_number_of_requests() -> None:
    settings = Settings((8, 1), (2.0,))
    assert [level.label for level in settings.levels] == ["1 at once", "8 at once", "2/s"]
    assert [settings.count(level, 5) for level in settings.levels] == [16, 24, 16]
    assert settings.count(Level(clients=8), 40) == 40 and Settings(requests=3).count(Level(clients=8), 40) == 3


def test_goodput_counts_answers_within_both_limits() -> None:
    settings = Settings(ttft_ms=100, tpot_ms=10)
    good, late, slow, short = (
        Outcome(0, 1, 0.1, 91),
        Outcome(0, 1, 0.2, 91),
        Outcome(0, 1, 0.1, 11),
        Outcome(0, 1, 0.1, 1),
    )
    assert [meets(each, settings) for each in (good, late, slow, short)] == [True, False, False, True]
    failed = Outcome(0, 2, error="timeout")
    row = figures(Level(rate=3), [good, late, slow, short, failed], settings, 6)
    assert (row["goodput"], row["goodput_share"], row["errors"], row["complete"]) == (1, 0.4, {"timeout": 1}, False)
    assert row["tokens"] == 194 and row["requests_per_second"] == 2 and row["latency"]["mean"] == 1
    assert percentiles([None]) is None and percentiles([1, 2, 3])["p50"] == 2  # type: ignore[index]
