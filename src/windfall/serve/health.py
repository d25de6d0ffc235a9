"""Whether the engine generates: the probe of /health and /ready, and of Ray."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter

from windfall.engine.engine import Engine
from windfall.serve.admission import Admission
from windfall.serve.errors import FAILED, ApiError, shutting_down

log = logging.getLogger(__name__)

PROBE: dict[str, Any] = {"policy": "none", "max_new_tokens": 1, "temperature": 0, "eos": ()}
HANG_SECONDS = 120.0  # that a text of one token may take; a long prompt before it takes long on a CPU
PATIENCE_SECONDS = 0.5  # that an answer waits for this text
FRESH_SECONDS = 5.0  # after which an idle engine is tried again


class Unhealthy(Exception):
    """The engine does not generate."""


class Health:
    """Tries the engine, with a text of one token at a time.

    An engine that has finished a pass since the last check is well. Otherwise it must generate a token: it may be idle,
    or hang, or fail in every pass.
    """

    def __init__(self, engine: Engine, hang_seconds: float = HANG_SECONDS, fresh_seconds: float = FRESH_SECONDS):
        self._engine, self.hang_seconds, self._fresh_seconds = engine, hang_seconds, fresh_seconds
        self._known_rounds = -1
        self._probe: asyncio.Task[None] | None = None
        self._began = self._well_until = 0.0  # times of the event loop

    async def check(self, patience: float = PATIENCE_SECONDS) -> None:
        """Raise Unhealthy if the engine does not generate.

        The call waits for `patience` seconds. If the engine has generated nothing by then, it counts as well until
        `hang_seconds` have passed.
        """
        self._check_thread()
        now, rounds = asyncio.get_running_loop().time(), self._engine.counters.rounds
        if rounds != self._known_rounds or now < self._well_until:
            self._known_rounds, self._began = rounds, now
            return
        if self._probe is None or self._probe.cancelled():
            self._probe, self._began = asyncio.create_task(self._generate()), now
        probe = self._probe
        await asyncio.wait({probe}, timeout=patience)
        self._check_thread()
        if probe.done():
            self._end(probe)
        elif asyncio.get_running_loop().time() - self._began >= self.hang_seconds:
            raise Unhealthy(f"the engine has generated nothing for {self.hang_seconds:.0f} seconds")

    def _check_thread(self) -> None:
        if self._engine.lost is not None:
            raise Unhealthy(f"the device is lost: {self._engine.lost}")
        if self._engine.closed:
            raise Unhealthy("the engine is closed")

    def _end(self, probe: asyncio.Task[None]) -> None:
        """Note the result of a probe that has ended."""
        if self._probe is probe:
            self._probe = None
        if error := probe.exception():
            raise Unhealthy(f"the engine fails: {error}") from error
        self._known_rounds = self._engine.counters.rounds
        self._well_until = asyncio.get_running_loop().time() + self._fresh_seconds

    async def _generate(self) -> None:
        await (await asyncio.to_thread(self._engine.submit, [0], **PROBE))


def health_routes(admission: Admission) -> APIRouter:
    routes, engine = APIRouter(), admission.engine
    probe = Health(engine)

    async def check() -> None:
        if engine.closed and engine.lost is None:
            raise shutting_down()
        try:
            await probe.check()
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
        return {"status": "ready", "running": admission.running, "waiting": admission.waiting}

    return routes
