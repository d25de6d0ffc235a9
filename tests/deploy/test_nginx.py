"""The configuration of nginx, with the real nginx before two servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from helpers.deploy import DEPLOY
from helpers.scheduling import held
from helpers.serving import http, new_engine, running, wait_for
from windfall.engine.engine import Engine
from windfall.engine.host_runner import HostRunner
from windfall.serve.settings import MAX_BODY_BYTES, Settings

CONFIGURATION = (DEPLOY / "nginx.conf").read_text("utf-8")
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
BODY = {"prompt": "Hi", "max_tokens": 2, "temperature": 0}
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


def test_the_limits_are_those_of_the_server() -> None:
    assert f"client_max_body_size {MAX_BODY_BYTES // 2**20}m;" in CONFIGURATION
    assert CONFIGURATION.count("server 127.0.0.1:800") == 2 and "listen 127.0.0.1:8000;" in CONFIGURATION


class Cluster(NamedTuple):
    """Two servers, and the address of nginx before them."""

    engines: list[Engine]
    url: str

    @property
    def answers(self) -> list[int]:
        """Texts that each server has finished."""
        return [sum(each.cumulative[-1] for each in own.counters.durations.values()) for own in self.engines]


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def configured(folder: Path, front: int, ports: list[str]) -> Path:
    """A whole configuration, with other ports and all files in this folder."""
    text = CONFIGURATION.replace("listen 127.0.0.1:8000", f"listen 127.0.0.1:{front}")
    for place, port in enumerate(ports, 1):
        text = text.replace(f"127.0.0.1:{8000 + place} ", f"127.0.0.1:{port} ")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    file = folder / "nginx.conf"
    file.write_text(
        f"pid {folder}/nginx.pid;\nerror_log {folder}/error.log;\ndaemon off;\nworker_processes 1;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{paths}\n{text}}}\n"
    )
    return file


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    engines, front = [new_engine(max_requests=1) for _ in range(2)], free_port()
    with running(engines[0], Settings(max_queue=0)) as one, running(engines[1], Settings(max_queue=0)) as other:
        file = configured(tmp_path, front, [url.rpartition(":")[2] for url in (one, other)])
        process = subprocess.Popen([str(NGINX), "-p", str(tmp_path), "-e", f"{tmp_path}/error.log", "-c", str(file)])
        try:
            wait_for(lambda: process.poll() is not None or listens(front))
            assert process.poll() is None, (tmp_path / "error.log").read_text()
            yield Cluster(engines, f"http://127.0.0.1:{front}")
        finally:
            process.terminate()
            process.wait(20)
    for each in engines:
        each.close()


def listens(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("127.0.0.1", port)) == 0


def ask(cluster: Cluster, session: str | None = None) -> dict[str, Any]:
    headers = {} if session is None else {"X-Session-Id": session}
    answer = http().post(f"{cluster.url}/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 200 and re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    found: dict[str, Any] = answer.json()
    return found


@needs_nginx
def test_a_session_stays_with_one_server(cluster: Cluster) -> None:
    for session in ("anna", "ben", "cleo"):
        before = cluster.answers
        for _ in range(3):
            ask(cluster, session)
        assert sorted(after - old for old, after in zip(before, cluster.answers, strict=True)) == [0, 3]
    for _ in range(12):
        ask(cluster)
    assert min(cluster.answers) > 0  # the others are spread; the chance that one server gets none is below 0.1%


@needs_nginx
def test_streams_are_not_buffered(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the header of the answer, one cycle runs. The next waits until the client has the text of the first."""
    cycles, usual = threading.Semaphore(0), HostRunner.round

    def when_allowed(self: HostRunner) -> Any:
        assert cycles.acquire(timeout=30)
        return usual(self)

    monkeypatch.setattr(HostRunner, "round", when_allowed)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "seed": 1, "stream": True}
    try:
        with http().stream("POST", f"{cluster.url}/v1/chat/completions", json=body) as answer:
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            cycles.release()
            role, piece = (json.loads(next(lines))["choices"][0]["delta"] for _ in range(2))
            assert role == {"role": "assistant", "content": ""} and piece["content"]
            cycles.release(100)
            *rest, end = lines
            assert any("content" in json.loads(line)["choices"][0]["delta"] for line in rest) and end == "[DONE]"
    finally:
        cycles.release(100)


@contextmanager
def waiting_text(cluster: Cluster) -> Iterator[httpx.Response]:
    """A stream of Anna's session, which has begun."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True}
    headers = {"X-Session-Id": "anna"}
    with http().stream("POST", f"{cluster.url}/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        yield answer


@needs_nginx
def test_if_all_are_full_the_client_is_told(cluster: Cluster) -> None:
    gates = [held(each)[0] for each in cluster.engines]
    try:
        with waiting_text(cluster) as one, waiting_text(cluster) as other:
            for _ in range(3):
                refused = http().post(f"{cluster.url}/v1/completions", json=BODY)
                assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 0
            for gate in gates:
                gate.open.set()
            assert one.read() and other.read()
        ask(cluster, "anna")
    finally:
        for gate in gates:
            gate.open.set()


@needs_nginx
def test_another_server_answers_for_a_full_or_stopped_one(cluster: Cluster) -> None:
    ask(cluster, "anna")
    place = cluster.answers.index(1)
    gate, _ = held(cluster.engines[place])
    try:
        with waiting_text(cluster) as answer:  # at its server, which takes no other
            before = cluster.answers[1 - place]
            ask(cluster, "anna")
            assert cluster.answers[1 - place] == before + 1
            gate.open.set()
            answer.read()
    finally:
        gate.open.set()
    cluster.engines[place].close()  # from now on it answers with 503
    before = cluster.answers[1 - place]
    ask(cluster, "anna")
    assert cluster.answers[1 - place] == before + 1


@needs_nginx
def test_limits_and_ids(cluster: Cluster) -> None:
    assert http().get(f"{cluster.url}/metrics").status_code == 404
    assert http().post(f"{cluster.url}/v1/completions", content=b"a" * (MAX_BODY_BYTES + 1)).status_code == 413
    answer = http().get(f"{cluster.url}/health", headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
