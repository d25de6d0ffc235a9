"""A replica: an engine and its server, in a process of their own."""

from __future__ import annotations

import gc
import os
from contextlib import ExitStack
from dataclasses import replace

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windfall.engine.engine import Engine
from windfall.engine.loading import load
from windfall.engine.profiling import remember
from windfall.ray.metrics import RayExport
from windfall.ray.options import KEY_VARIABLE, Options
from windfall.serve import log_format
from windfall.serve.admission import Admission
from windfall.serve.app import make_app
from windfall.serve.health import Health
from windfall.serve.request_log import ID_HEADER

PROBE_SECONDS = 50.0  # that a text of one token may take, less than Ray waits for a health check


class WithoutRequestId:
    """Middleware that leaves out the id of the request: Ray's proxy chose it, and adds it to the answer itself."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[ID_HEADER]
            await send(message)

        await self.app(scope, receive, without_id)


class Replica:
    """Loads the engine when Ray starts the process, and closes it when Ray ends it."""

    def __init__(self, options: Options, engine: Engine | None = None):
        """`engine`: a loaded one, for tests."""
        self._log = ExitStack()
        self._log.enter_context(log_format.logging_as(options.log_format))
        own_key = os.environ.get(KEY_VARIABLE)
        if own_key and not options.api_keys:  # of the machine that the replica runs on
            options = replace(options, api_keys=(own_key,))
        self._settings = options.settings
        self.engine = engine or load(**options.load)
        self.engine.prepare()  # Ray sends requests to a replica that is ready, which it is after this
        if engine is None:
            gc.collect()
            gc.freeze()  # a collection over all objects of the model would interrupt texts
        self.health = Health(Admission(self.engine, self._settings), PROBE_SECONDS, fresh_seconds=0)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The application that `windfall serve` runs, too."""
        app = make_app(self.engine, self._settings)
        app.add_middleware(WithoutRequestId)
        self._export = RayExport(app.state.metrics)
        self._export.start()
        return app

    async def check_health(self) -> None:
        """Raise an error if the engine does not generate; Ray then starts another replica."""
        await self.health.check(self.health.hang_seconds)

    def __del__(self) -> None:
        """Ray calls this when all requests have ended, or the time for them is over."""
        made = self.__dict__  # without an engine, if it could not be loaded
        if "_export" in made:
            self._export.end()
        if "engine" in made and not self.engine.closed:
            self.engine.close()
            if self.engine.policy.uses_costs:
                remember(self.engine)
        if "_log" in made:
            self._log.close()
