"""The ASGI application."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fastapi import FastAPI
from pydantic import BaseModel

from windfall import __version__
from windfall.serve.backend import Backend
from windfall.serve.calls import served_name
from windfall.serve.chat import chat_routes
from windfall.serve.completions import completion_routes
from windfall.serve.errors import Failures, add_handlers
from windfall.serve.guard import OPEN_PATHS, BodyLimit, KeyCheck
from windfall.serve.health import health_routes
from windfall.serve.live import live_routes
from windfall.serve.live_page import PAGE_PATHS, page_routes
from windfall.serve.metrics import Metrics, metric_routes
from windfall.serve.models import model_routes
from windfall.serve.openapi import describe
from windfall.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from windfall.serve.request_log import RequestLog
from windfall.serve.settings import SWITCH_SECONDS, Settings
from windfall.serve.tokenize import tokenize_routes

if TYPE_CHECKING:
    from windfall.engine.engine import Engine


BODIES: dict[str, type[BaseModel]] = {  # of the POST routes
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def make_app(engine: Engine, settings: Settings | None = None) -> FastAPI:
    """The OpenAI API over this engine, for any ASGI server. The caller closes the engine after the server has ended."""
    from windfall.serve.admission import Admission  # imports torch

    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
    return app_over(Admission(engine, settings or Settings()))


def app_over(backend: Backend) -> FastAPI:
    """The OpenAI API over an engine in this process or in another."""
    settings, metrics = backend.settings, Metrics(backend, served_name(backend))
    app = FastAPI(title="windfall", version=__version__, docs_url=None, redoc_url=None)
    app.state.metrics = metrics
    for make_routes in (model_routes, chat_routes, completion_routes, tokenize_routes):
        app.include_router(make_routes(backend))
    app.include_router(metric_routes(backend, metrics))
    if settings.page:
        app.include_router(page_routes())
        app.include_router(live_routes(backend))

    app.include_router(health_routes(backend))
    add_handlers(app)
    describe(app, BODIES, keys=bool(settings.api_keys))
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)  # the last one added is the first that is called
    if settings.api_keys:
        open_paths = (*OPEN_PATHS, *(PAGE_PATHS if settings.page else ()))
        app.add_middleware(KeyCheck, keys=settings.api_keys, open_paths=open_paths)
    app.add_middleware(Failures)
    app.add_middleware(RequestLog, count=metrics.add_answer)
    return app
