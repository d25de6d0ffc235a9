"""Runs the application with uvicorn."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from windfall.core.errors import InputError
from windfall.engine.engine import Engine
from windfall.serve.settings import DRAIN_SECONDS

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


def make_server(app: FastAPI, drain_seconds: int = DRAIN_SECONDS) -> uvicorn.Server:
    """A server that logs warnings and errors only."""

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
    return uvicorn.Server(config)


def run(app: FastAPI, bound: socket.socket, engine: Engine, drain_seconds: int = DRAIN_SECONDS) -> None:
    """Serve until SIGTERM or Ctrl-C; then accept nothing more, and let running requests finish within a limit.

    A second Ctrl-C ends the server at once. If the device of the engine is lost, the server ends with a SystemExit.
    """
    server = make_server(app, drain_seconds)
    engine.when_lost(lambda: setattr(server, "should_exit", True))
    received: list[int] = []
    with _recorded_signals(received):
        server.run(sockets=[bound])
    if engine.lost is not None:
        log.error("the server ends, because its device is lost: %s", engine.lost)
        raise SystemExit(DEVICE_LOST)
    if signal.SIGINT in received:
        raise KeyboardInterrupt


@contextmanager
def _recorded_signals(received: list[int]) -> Iterator[None]:
    """uvicorn handles signals, and sends them again when it ends. Then the caller has to close the engine."""
    before = {each: signal.signal(each, lambda number, _: received.append(number)) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
