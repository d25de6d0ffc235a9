"""Runs the application with uvicorn."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from windfall.core.errors import InputError
from windfall.serve.settings import DRAIN_SECONDS

if TYPE_CHECKING:
    from windfall.engine.engine import Engine

log = logging.getLogger(__name__)

DEVICE_LOST = 1  # exit code: a supervisor should start the server again
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """A socket with this address, on which uvicorn listens later; port 0 is a free port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot listen on {host}, port {port}: {reason}") from None
    return made


def is_local(bound: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def address(bound: socket.socket) -> str:
    """The URL of the server."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """A server that makes a call in its event loop before it accepts connections."""

    def __init__(self, config: uvicorn.Config, before: Callable[[], None]):
        super().__init__(config)
        self._before = before

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._before()
        await super().startup(sockets)


def make_server(
    app: FastAPI, drain_seconds: int = DRAIN_SECONDS, before: Callable[[], None] = lambda: None
) -> uvicorn.Server:
    """A server that logs warnings and errors only. `before` is called in its event loop when it starts."""

    async def quiet(scope: Scope, receive: Receive, send: Send) -> None:
        """The app; uvicorn would print a traceback of a request that it cancels itself."""
        with suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    config = uvicorn.Config(
        quiet,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=drain_seconds,
    )
    return Server(config, before)


def run(app: FastAPI, bound: socket.socket, engine: Engine, drain_seconds: int = DRAIN_SECONDS) -> None:
    """Serve until SIGTERM or Ctrl-C; then accept nothing more, and let running requests finish within a limit.

    A second Ctrl-C ends the server at once. If the device of the engine is lost, the server ends with a SystemExit.
    """
    server = make_server(app, drain_seconds)
    engine.when_lost(lambda: setattr(server, "should_exit", True))
    with received_signals() as received:
        server.run(sockets=[bound])
    if engine.lost is not None:
        log.error("the server ends, because its device is lost: %s", engine.lost)
        raise SystemExit(DEVICE_LOST)
    if signal.SIGINT in received:
        raise KeyboardInterrupt


@contextmanager
def received_signals(wake: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """The signals that ask the server to end, as they are received in this block; `wake` is called after each.

    uvicorn handles signals, and sends them again when it ends. Then the caller has to close the engine. Only the main
    thread receives signals.
    """
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)
        wake()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {each: signal.signal(each, receive) for each in SIGNALS}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
