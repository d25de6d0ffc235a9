"""A server with HTTP processes: messages, limits and figures of the whole server, and how its processes end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.cli import folder as folder
from helpers.cli import refused, windfall
from helpers.scheduling import held
from helpers.serving import http, new_engine, running_as_processes, wait_for
from windfall.core.constraint import Constraint
from windfall.core.errors import InputError, RoomError
from windfall.serve import server
from windfall.serve.admission import Admission
from windfall.serve.backend import Job
from windfall.serve.errors import ApiError, too_busy
from windfall.serve.settings import Settings
from windfall.serve.workers import channel as channels
from windfall.serve.workers import pool
from windfall.serve.workers.channel import Channel
from windfall.serve.workers.hub import Hub
from windfall.serve.workers.messages import Problem, Submit
from windfall.serve.workers.remote_text import RemoteText

BODY = {"prompt": "Hi", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
QUICK = ("--policy", "none", "--device", "cpu", "--port", "0")


# ---- the parts


def pair() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one), Channel(other)


def test_messages_arrive_whole_and_in_order() -> None:
    sender, receiver = pair()
    messages = ["a" * size for size in (0, 1, 10**6, 3, 2 * 10**6)]
    sent = list(map(sender.send, messages))
    assert sent[0] and not sent[-1] and sender.full
    found = list[str]()
    while len(found) < len(messages):
        found += receiver.receive()
        sender.flush()
    assert found == messages and not sender.full
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.send("unread")
    receiver.close()


def test_a_process_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_WAITING", 2**20)
    sender, receiver = pair()
    for _ in range(40):
        sender.send(b"." * 2**17)
    for end in (receiver, sender):
        with pytest.raises(EOFError):
            receive_all(end)
        end.close()


def receive_all(channel: Channel) -> None:
    while True:
        channel.receive()


def test_errors_are_the_same_in_the_other_process() -> None:
    busy = too_busy("full", 5)
    again: Any = Problem.of(busy).error
    assert isinstance(again, ApiError) and (again.status, again.headers) == (429, {"Retry-After": "5"})
    assert again.body == busy.body
    for error in (InputError("no"), RoomError("no room", 3)):
        again = Problem.of(error).error
        assert isinstance(again, InputError) and str(again) == str(error)
    again = Problem.of(ZeroDivisionError("no")).error
    assert (type(again).__name__, str(again)) == ("ZeroDivisionError", "no")


def test_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.default_count("cpu") == pool.checked_count(0) == 0
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for cores, count in ((1, 0), (4, 1), (8, 2), (16, 4), (128, 4)):
        monkeypatch.setattr(pool, "cores", lambda cores=cores: cores)
        assert pool.default_count(None) == pool.default_count("cuda:1") == count
    assert "--http-processes takes a number from 0 to 64, not -1" in refused("serve", "--http-processes", "-1")


def test_a_tokenizer_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(InputError, match="the tokenizer cannot be sent to HTTP processes: "):
        pool.check_tokenizer(threading.Lock())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not share connections evenly")
def test_connections_are_shared_and_the_port_is_not() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        sockets = pool.listeners(bound, 4)
        for each in sockets:
            each.listen(100)
            each.setblocking(False)
        with socket.socket() as another:
            another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                another.bind(bound.getsockname())
        clients = [socket.create_connection(bound.getsockname()) for _ in range(64)]
        counts = [accepted(each) for each in sockets]
        assert sum(counts) == 64 and min(counts) > 2
        for each in (*clients, *sockets):
            each.close()


def accepted(listener: socket.socket) -> int:
    count = 0
    try:
        while True:
            listener.accept()[0].close()
            count += 1
    except BlockingIOError:
        return count


# ---- several processes, in threads of this one


def metrics(url: str) -> str:
    return http().get(f"{url}/metrics").text


def test_limits_and_figures_are_those_of_the_whole_server() -> None:
    made = new_engine(max_requests=1)
    gate, _ = held(made)
    with running_as_processes(made, 2, Settings(max_queue=1)) as (one, other), ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(http().post, f"{one}/v1/completions", json=BODY) for _ in range(2)]
        wait_for(lambda: made.running + made.waiting >= 2)  # a text of the engine's own holds the gate
        busy = http().post(f"{other}/v1/completions", json=BODY)
        assert busy.status_code == 429 and busy.headers["retry-after"] == "1"
        assert busy.json()["error"]["message"].startswith("the queue is full: 1 text in progress, 1 waiting")
        assert http().get(f"{other}/live").json()["waiting"] == 1
        gate.open.set()
        assert [answer.result().status_code for answer in answers] == [200, 200]
        for url in (one, other):
            wait_for(lambda url=url: 'http_requests_total{route="/v1/completions",status="200"} 2.0' in metrics(url))
            assert 'requests_refused_total{reason="queue_full"} 1.0' in metrics(url)
    made.close()


def test_a_text_that_cannot_be_decoded_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = RemoteText.receive

    def receive(self: RemoteText, *given: Any) -> None:
        usual(self, *given)
        if self.prompt_tokens == 3:
            raise ValueError("this token has no text")

    monkeypatch.setattr(RemoteText, "receive", receive)
    made = new_engine()
    with running_as_processes(made, 1) as (url,), ThreadPoolExecutor(2) as threads:
        bodies = ({**BODY, "prompt": prompt, "max_tokens": 60} for prompt in ("Hi", "Hey"))
        answers = [threads.submit(http().post, f"{url}/v1/completions", json=body) for body in bodies]
        assert [answer.result().status_code for answer in answers] == [200, 500]
        wait_for(lambda: http().get(f"{url}/ready").json()["running"] == 0)
    made.close()


def test_the_texts_of_a_process_that_has_ended_are_cancelled() -> None:
    made = new_engine(max_requests=2)
    hub, (ours, others) = Hub(Admission(made, Settings())), socket.socketpair()
    left = list[bool]()
    hub.add(ours, hub.hello("none", 1), 0, when_closed=lambda: left.append(True))
    sampling = {"max_new_tokens": 80, "eos": ()}
    slow = {**sampling, "constraint": Constraint.regex("[a-z]{70,80}")}
    gate, _ = held(made)
    channel = Channel(others)
    for first, keywords in ((0, sampling), (1, sampling), (2, slow)):
        channel.send(Submit(first, [Job([1, 2, 3], True, keywords, encoded=True)]))
    wait_for(lambda: hub.step(0.01) or hub.admission.figures.unfinished == 3)
    channel.close()
    wait_for(lambda: hub.step(0.01) or left)
    gate.open.set()
    wait_for(lambda: hub.admission.figures.unfinished == 0)
    wait_for(lambda: made.counters.durations["cancelled"].cumulative[-1] == 3)
    hub.close()
    made.close()


# ---- real processes


@contextmanager
def served(folder: Path, count: int, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    """A server with this number of HTTP processes, its address and their ids."""
    command = [sys.executable, "-m", "windfall", "serve", "--target", str(folder), *QUICK]
    command += ["--http-processes", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    process = subprocess.Popen([*command, "--log-format", "json", *options], **how)
    try:
        assert process.stderr is not None
        url = re.findall(r"(http://[^/]+)/v1", process.stderr.readline())[0]
        wait_for(lambda: status(f"{url}/v1/models") == 200, 60)
        yield process, url, children(process.pid)
    finally:
        process.kill()
        process.communicate()


def status(url: str) -> int:
    """The status of an answer over a new connection, to any of the processes."""
    try:
        return httpx.get(url, timeout=20).status_code
    except httpx.TransportError:
        return 0


def children(process: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_a_process_that_has_ended_is_replaced_and_sigterm_ends_all(folder: Path) -> None:
    with served(folder, 2, "--drain-seconds", "20") as (process, url, processes):
        assert len(processes) == 2
        assert not any("libtorch" in Path(f"/proc/{each}/maps").read_text() for each in processes)
        assert [httpx.post(f"{url}/v1/completions", json=BODY).status_code for _ in range(4)] == [200] * 4
        os.kill(processes[0], signal.SIGKILL)
        wait_for(lambda: len(children(process.pid)) == 2 and processes[0] not in children(process.pid))
        processes = children(process.pid)
        assert [status(f"{url}/v1/models") for _ in range(8)] == [200] * 8
        found = httpx.get(f"{url}/metrics").text
        assert re.findall(r"generation_tokens_total\{.*\} (.*)", found) == ["48.0"]
        with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "max_tokens": 200, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(20) == 0
        wait_for(lambda: all(map(ended, processes)))
        assert process.stdout is not None and process.stderr is not None
        (message,) = map(json.loads, process.stderr)
        assert message["message"] == "an HTTP process has ended (exit code -9); another one takes its place"
        routes = [line["route"] for line in map(json.loads, process.stdout)]
        assert routes.count("/v1/completions") == 5


@linux
def test_no_process_is_left_when_the_engine_is_killed(folder: Path) -> None:
    with served(folder, 1) as (process, _, processes):
        process.kill()
        process.wait(20)
        wait_for(lambda: all(map(ended, processes)))


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals need the main thread")
def test_ctrl_c_ends_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets, pools = list[socket.socket](), list[pool.Pool]()
    bind, run = server.bind, pool.Pool.run
    monkeypatch.setattr(server, "bind", lambda *given: sockets.append(bind(*given)) or sockets[0])
    monkeypatch.setattr(pool.Pool, "run", lambda made, *given: pools.append(made) or run(made, *given))

    def interrupt() -> None:
        wait_for(lambda: pools and status(f"{server.address(sockets[0])}/v1/models") == 200)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as threads:
        interrupted = threads.submit(interrupt)
        result = windfall("serve", "--target", folder, *QUICK, "--http-processes", "1")
        interrupted.result()
    assert result.exit_code == 130 and pools[0].ids == []


def test_a_process_that_does_not_start_ends_the_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    result = windfall("serve", "--target", folder, *QUICK, "--http-processes", "1")
    assert result.exit_code == 1
    assert "an HTTP process did not start (exit code 1): the server ends" in result.stderr


def test_a_tokenizer_that_cannot_be_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a number of processes, the process of the engine answers."""

    def refuse(_: Any) -> None:
        raise InputError("the tokenizer cannot be sent")

    monkeypatch.setattr(pool, "check_tokenizer", refuse)
    assert refused("serve", "--target", folder, *QUICK, "--http-processes", "1") == "the tokenizer cannot be sent"
    monkeypatch.setattr(pool, "default_count", lambda device: 1)
    monkeypatch.setattr("windfall.serve.server.run", lambda *_: None)
    result = windfall("serve", "--target", folder, *QUICK)
    assert "the process of the engine answers HTTP requests: the tokenizer cannot be sent" in result.stderr
    assert result.exit_code == 0
