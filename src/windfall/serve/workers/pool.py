"""Starts the HTTP processes of a server, restarts one that has ended, and ends them all."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from windfall.core.errors import InputError
from windfall.core.wording import first_line
from windfall.serve.server import DEVICE_LOST, received_signals
from windfall.serve.settings import SWITCH_SECONDS

if TYPE_CHECKING:
    from windfall.serve.admission import Admission

log = logging.getLogger(__name__)

MOST = 64  # processes
MOST_BY_DEFAULT, CORES_PER_PROCESS = 4, 4  # one process answers about 500 requests of 128 tokens per second
FAILED = 1  # exit code: a supervisor should start the server again
BACKLOG = 2048  # connections that wait to be accepted, by each process
WAIT_SECONDS = 1.0  # between two looks at the processes
GRACE_SECONDS = 5.0  # that a process has to end, besides the time for its requests


class HttpProcess:
    """A process that answers HTTP requests on one socket. It waits for its engine when it has started."""

    def __init__(self, bound: socket.socket):
        self.bound = bound
        self.connection, other = socket.socketpair()
        command = [sys.executable, "-m", "windfall.serve.workers.process", str(other.fileno()), str(bound.fileno())]
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
        with other:  # it has a session of its own: Ctrl-C is meant for the process of the engine
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(other.fileno(), bound.fileno()),
                start_new_session=True,
            )
        self.ready = False

    @property
    def id(self) -> int:
        return self._process.pid

    def drain(self) -> None:
        """Let it accept no more connections, and end when its requests have ended."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """Its exit code, after it has closed the connection."""
        try:
            return self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def close(self) -> None:
        """End it at once."""
        self.connection.close()
        self.kill()
        self._process.wait()


class Pool:
    """The HTTP processes of a server."""

    def __init__(self, bound: socket.socket, count: int):
        """`bound`: a socket with the server's address; no process listens on it yet."""
        self._listeners = listeners(bound, count)
        self._processes = [HttpProcess(each) for each in self._listeners]
        self._until: float | None = None  # when they must have ended
        self.ready = threading.Event()  # all processes accept connections
        self._failed = False

    def run(self, admission: Admission, log_format: str, drain_seconds: int) -> None:
        """Serve until SIGTERM or Ctrl-C; then accept nothing more, and let running requests finish within a limit.

        A second Ctrl-C ends the server at once. If the device of the engine is lost, or a process does not start, the
        server ends with a SystemExit.
        """
        from windfall.serve.workers.hub import Hub  # imports torch

        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._hub, self._drain_seconds = Hub(admission), drain_seconds
        self._hello = self._hub.hello(log_format, drain_seconds)
        admission.engine.when_lost(lambda: self._hub.call(self._drain))
        for each in self._listeners:
            each.listen(BACKLOG)  # connections wait until the processes have heard from the engine
        for process in self._processes:
            self._connect(process)
        try:
            with received_signals(self._hub.wake) as received:
                self._pass_messages(received)
        finally:
            self._hub.close()
        if admission.engine.lost is not None:
            log.error("the server ends, because its device is lost: %s", admission.engine.lost)
            raise SystemExit(DEVICE_LOST)
        if self._failed:
            raise SystemExit(FAILED)
        if signal.SIGINT in received:
            raise KeyboardInterrupt

    def _pass_messages(self, received: list[int]) -> None:
        """Until all processes have ended; the first of these signals asks them to."""
        handled = 0
        while self._processes:
            self._hub.step(WAIT_SECONDS)
            for number in received[handled:]:
                self._drain(at_once=number == signal.SIGINT and handled > 0)
                handled += 1
            if self._until is not None and time.monotonic() > self._until:
                self._kill()

    def stop(self) -> None:
        """Let `run` end as after SIGTERM; any thread may ask."""
        self._hub.call(self._drain)

    @property
    def ids(self) -> list[int]:
        """The ids of the processes."""
        return [process.id for process in self._processes]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.close()
        for each in self._listeners[1:]:  # the first one is the caller's
            each.close()

    def _connect(self, process: HttpProcess) -> None:
        def ready() -> None:
            process.ready = True
            if all(each.ready for each in self._processes):
                self.ready.set()

        self._hub.add(process.connection, self._hello, process.id, ready, lambda: self._replace(process))

    def _replace(self, process: HttpProcess) -> None:
        """A process has closed its connection."""
        self._processes.remove(process)
        code = process.end()
        if self._until is not None:
            return
        if not process.ready:
            log.error("an HTTP process did not start (exit code %d): the server ends", code)
            self._failed = True
            self._drain()
            return
        log.error("an HTTP process has ended (exit code %d); another one takes its place", code)
        self._processes.append(HttpProcess(process.bound))
        self._connect(self._processes[-1])

    def _drain(self, at_once: bool = False) -> None:
        """Accept no more connections, and let all processes end."""
        if self._until is None:
            self._until = time.monotonic() + self._drain_seconds + GRACE_SECONDS
            for each in self._listeners:
                each.close()
            for process in self._processes:
                process.drain()
        if at_once:
            self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


@contextmanager
def http_processes(bound: socket.socket, count: int) -> Iterator[Pool]:
    """HTTP processes that start now, and wait for `Pool.run`. They end with this block."""
    pool = Pool(bound, count)
    try:
        yield pool
    finally:
        pool.close()


def checked_count(count: int) -> int:
    """A number of HTTP processes; 0: the process of the engine answers HTTP requests itself."""
    if not 0 <= count <= MOST:
        raise InputError(f"--http-processes takes a number from 0 to {MOST}, not {count}")
    if count and os.name != "posix":
        raise InputError("--http-processes needs Linux or macOS")
    return count


def default_count(device: str | None) -> int:
    """The number of HTTP processes if none is given: some if there is a GPU and enough CPU cores, else 0."""
    if os.name != "posix" or (device or "cuda").partition(":")[0] != "cuda":
        return 0
    import torch

    return min(cores() // CORES_PER_PROCESS, MOST_BY_DEFAULT) if torch.cuda.is_available() else 0


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_tokenizer(tokenizer: object) -> None:
    """Refuse a tokenizer that cannot be sent to another process."""
    try:
        pickle.dumps(tokenizer)
    except Exception as error:
        raise InputError(f"the tokenizer cannot be sent to HTTP processes: {first_line(error)}") from None


def listeners(bound: socket.socket, count: int) -> list[socket.socket]:
    """Sockets with this address, among which connections are shared.

    Linux shares them evenly among several sockets. The first one was bound alone, so another server on the same port
    is still refused. Elsewhere, all processes listen on one socket.
    """
    made = [bound]
    if sys.platform == "linux" and count > 1:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        for _ in range(count - 1):
            made.append(socket.socket(bound.family, bound.type, bound.proto))
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                made[-1].setsockopt(socket.SOL_SOCKET, option, 1)
            with suppress(AttributeError, OSError):  # as the first one, for IPv6
                made[-1].setsockopt(
                    socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, bound.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
                )
            made[-1].bind(bound.getsockname())
    return made if sys.platform == "linux" else [bound] * count
