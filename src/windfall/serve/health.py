"""Whether the engine generates: the probe of /health and /ready, and of Ray."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from fastapi import APIRouter

from windfall.serve.backend import Backend
from windfall.serve.errors import FAILED, ApiError, shutting_down

log = logging.getLogger(__name__)

HANG_SECONDS = 120.0  # that a text of one token may take; a long prompt before it takes long on a CPU
PATIENCE_SECONDS = 0.5  # that an answer waits for this text
FRESH_SECONDS = 5.0  # after which an idle engine is tried again


class Unhealthy(Exception):
    """The engine does not generate."""


class Closed(Unhealthy):
    """The engine was closed."""


class Health:
    """Tries the engine, with a text of one token at a time.

    An engine that has finished a pass since the last check is well. Otherwise it must generate a token: it may be idle,
    or hang, or fail in every pass.
    """

    def __init__(self, backend: Backend, hang_seconds: float = HANG_SECONDS, fresh_seconds: float = FRESH_SECONDS):
        self._backend, self.hang_seconds, self._fresh_seconds = backend, hang_seconds, fresh_seconds
        self._known_rounds = -1
        self._probe: asyncio.Task[None] | None = None
        self._began = self._well_until = 0.0  # times of the event loop

    async def check(self, patience: float = PATIENCE_SECONDS) -> None:
        """Raise Unhealthy if the engine does not generate.

        The call waits for `patience` seconds. If the engine has generated nothing by then, it counts as well until
        `hang_seconds` have passed.
        """
        await self._refresh()
        self._check_engine()
        now, rounds = asyncio.get_running_loop().time(), self._backend.figures.counters.rounds
        if rounds != self._known_rounds or now < self._well_until:
            self._known_rounds, self._began = rounds, now
            return
        if self._probe is None or self._probe.cancelled():
            self._probe, self._began = asyncio.create_task(self._backend.probe()), now
        probe = self._probe
        await asyncio.wait({probe}, timeout=patience)
        self._check_engine()
        if probe.done():
            self._end(probe)
        elif asyncio.get_running_loop().time() - self._began >= self.hang_seconds:
            raise Unhealthy(f"the engine has generated nothing for {self.hang_seconds:.0f} seconds")

    async def _refresh(self) -> None:
        try:
            await asyncio.wait_for(self._backend.refresh(), self.hang_seconds)
        except asyncio.TimeoutError:
            raise Unhealthy("the process of the engine does not answer") from None

    def _check_engine(self) -> None:
        if self._backend.lost is not None:
            raise Unhealthy(f"the device is lost: {self._backend.lost}")
        if self._backend.closed:
            raise Closed("the engine is closed")

    def _end(self, probe: asyncio.Task[None]) -> None:
        """Note the result of a probe that has ended."""
        if self._probe is probe:
            self._probe = None
        if error := probe.exception():
            raise Unhealthy(f"the engine fails: {error}") from error
        self._known_rounds = self._backend.figures.counters.rounds
        self._well_until = asyncio.get_running_loop().time() + self._fresh_seconds


def health_routes(backend: Backend) -> APIRouter:
    routes, probe = APIRouter(), Health(backend)

    async def check() -> None:
        try:
            await probe.check()
        except Closed:
            raise shutting_down() from None
        except Unhealthy as error:
            log.error("unhealthy: %s", error)
            message = "the engine does not generate; the log of the server says why"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, FAILED, code="unhealthy") from None

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> dict[str, str]:
        await check()
        return {"status": "ok"}

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready")
    async def ready() -> dict[str, str | int]:
        await check()
        texts, most = backend.figures.unfinished, backend.max_requests
        return {"status": "ready", "running": min(texts, most), "waiting": max(texts - most, 0)}

    return routes
