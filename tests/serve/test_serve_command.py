"""`windfall serve`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from helpers.cli import folder as folder
from helpers.cli import refused, windfall
from helpers.deploy import serve_options
from helpers.serving import http, wait_for
from windfall.cli import serve
from windfall.engine.host_runner import HostRunner
from windfall.serve import server
from windfall.serve.errors import NOT_YET
from windfall.serve.neutral import CHAT, COMPLETIONS, IGNORED, STREAM
from windfall.serve.protocol import MAX_N, MAX_STOPS, ChatRequest, CompletionRequest, Speculation
from windfall.serve.settings import DRAIN_SECONDS, MAX_BODY_BYTES

QUICK = ("--policy", "none", "--device", "cpu")


def test_the_help_names_the_options() -> None:
    shown = windfall("serve", "--help").stdout
    options = ("--target", "--max-requests", "--host", "--port", "--api-key", "--max-queue", "--served-model-name")
    assert all(
        option in shown
        for option in (*options, "--request-timeout", "--drain-seconds", "--max-body-mb", "--log-format", "--no-page")
    )


def test_the_page_has_all_fields_options_and_limits() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "serve.md").read_text("utf-8")
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *Speculation.model_fields, *IGNORED, *NOT_YET}
    fields |= {*CHAT, *COMPLETIONS, *STREAM}
    assert [name for name in sorted(fields) if f"`{name}`" not in page] == []
    shown = [name for name, option in serve_options().items() if name.startswith("--") and not option.hidden]
    assert "--target" in shown and [name for name in shown if f"`{name}`" not in page] == []
    for limit in (f"{DRAIN_SECONDS} seconds", f"at most {MAX_N}", f"at most {MAX_STOPS} texts", "4 MiB"):
        assert limit in page
    assert f"{DRAIN_SECONDS} seconds" in (serve.serve.__doc__ or "")
    assert MAX_BODY_BYTES == 4 * 2**20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--port", "70000"), "--port takes a number from 0 to 65535, not 70000"),
        (("--port", "web"), "--port takes a whole number, not 'web'"),
        (("--api-key", ""), "an API key must not be empty"),
        (("--max-queue", "-1"), "max_queue must be a whole number of at least 0, not -1"),
        (("--request-timeout", "0"), "request_timeout must be a number of seconds above 0"),
        (("--served-model-name", ""), "must not be empty"),
        (("--log-format", "xml"), "--log-format takes text, json or none, not 'xml'"),
        (("--drain-seconds", "-1"), "--drain-seconds must be at least 0, not -1"),
        (("--max-body-mb", "0"), "--max-body-mb must be at least 1, not 0"),
        (("--host", "no such host"), "cannot listen on no such host, port 8000"),
        (("--policy", "nothing"), "there is no policy 'nothing'"),
        (("--request-policy", "nothing"), "there is no policy 'nothing'"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options: tuple[str, ...], words: str) -> None:
    assert words in refused("serve", *options)


def test_a_port_in_use_is_refused_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1, port {port}: " in refused("serve", "--port", port)


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert (
        refused("serve") == "the server needs fastapi, uvicorn and prometheus_client; run: pip install windfall[serve]"
    )


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [("0.0.0.0", (), True), ("0.0.0.0", ("--api-key", "secret"), False), ("127.0.0.1", (), False)],
)
def test_an_open_server_without_a_key_is_warned_about(
    folder: Path, monkeypatch: pytest.MonkeyPatch, host: str, keys: tuple[str, ...], warned: bool
) -> None:
    monkeypatch.setattr(server, "run", lambda *_: None)
    result = windfall("serve", "--target", folder, "--host", host, "--port", 0, *keys, *QUICK)
    assert result.exit_code == 0 and "secret" not in result.output
    assert ("without a key" in result.stderr) == warned
    assert re.search(rf"serving tiny on http://{host}:\d+/v1 \(live page: http://{host}:\d+/\)\n", result.stderr)


def test_no_page_is_announced_without_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "run", lambda *_: None)
    result = windfall("serve", "--target", folder, "--port", 0, "--no-page", *QUICK)
    assert result.exit_code == 0 and "live page" not in result.stderr


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve._keys([]) == ()
    monkeypatch.setenv("WINDFALL_API_KEY", "secret")
    assert serve._keys([]) == ("secret",) and serve._keys(["a", "b"]) == ("a", "b")


def is_up(url: str) -> bool:
    try:
        return http().get(f"{url}/models").status_code == 200
    except httpx.ConnectError:
        return False


def test_sigterm_lets_the_running_request_finish(folder: Path) -> None:
    command = [sys.executable, "-m", "windfall", "serve", "--target", folder, "--port", "0", *QUICK]
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(
        [*command, "--log-format", "json", "--drain-seconds", "20"], env={**os.environ, "OMP_NUM_THREADS": "1"}, **how
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stderr.readline()
        url = re.findall(r"http://\S+", line)[0]
        body = {"prompt": "Hi", "max_tokens": 200, "ignore_eos": True, "stream": True, "seed": 1}
        wait_for(lambda: is_up(url))
        with http().stream("POST", f"{url}/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
        *_, line = map(json.loads, process.stdout)
        assert (line["route"], line["status"], line["finish_reason"]) == ("/v1/completions", 200, "length")
        assert line["completion_tokens"] == 200 and line["prompt_tokens"] == 2
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("processes", [0, 1])
def test_a_lost_device_ends_the_server_with_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """A supervisor starts it again."""
    sockets: list[socket.socket] = []
    bind = server.bind

    def remembered(host: str, port: int) -> socket.socket:
        sockets.append(bind(host, port))
        return sockets[0]

    def lose(_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def ask() -> int:
        wait_for(lambda: sockets)
        url = server.address(sockets[0])
        wait_for(lambda: is_up(f"{url}/v1"))
        return http().post(f"{url}/v1/completions", json={"prompt": "Hi"}).status_code

    monkeypatch.setattr(server, "bind", remembered)
    monkeypatch.setattr(HostRunner, "round", lose)
    with ThreadPoolExecutor(1) as threads:
        status = threads.submit(ask)
        result = windfall("serve", "--target", folder, "--port", 0, *QUICK, "--http-processes", processes)
        assert status.result() in (500, 503)
    assert result.exit_code == server.DEVICE_LOST != 0
    assert "the server ends, because its device is lost: CUDA error: device-side" in result.stderr
