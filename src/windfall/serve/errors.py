"""Errors in the shape of OpenAI's API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windfall.core.errors import InputError

log = logging.getLogger(__name__)

INVALID, FAILED = "invalid_request_error", "server_error"  # types
RETRY_AFTER_SECONDS = 1  # when a busy server may be asked again
CLIENT_CLOSED_REQUEST = 499  # the status that nginx logs in this case
NOT_YET = ("suffix", "best_of", "min_tokens", "functions")  # fields


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=dict(self.headers or {}))


class Disconnected(Exception):
    """The client has closed the connection."""


def shutting_down() -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down", FAILED, code="shutting_down")


def too_busy(reason: str, retry_seconds: int = RETRY_AFTER_SECONDS) -> ApiError:
    """The error of a request that would have to wait for too many others."""
    headers = {"Retry-After": str(retry_seconds)}
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"{reason}; try again later",
        "rate_limit_error",
        code="queue_full",
        headers=headers,
    )


def as_api_error(error: Exception) -> ApiError:
    """The error that a client sees; the cause of an unexpected one goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(HTTPStatus.BAD_REQUEST, str(error))
    if isinstance(error, ValidationError):
        return _of_validation(error)
    if isinstance(error, Disconnected):
        return ApiError(CLIENT_CLOSED_REQUEST, "the client has closed the connection")
    log.error("a request failed: %s: %s", type(error).__name__, error)
    log.debug("the cause", exc_info=error)
    error.__traceback__ = None  # it refers to the texts, and they to the error: all would wait for a garbage collection
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed to answer this request", FAILED)


def _of_validation(error: ValidationError) -> ApiError:
    """An error that names the first field that is wrong."""
    first = error.errors(include_url=False, include_context=False)[0]
    kind, where = first["type"], first["loc"]
    param = ".".join(str(part) for part in where if isinstance(part, int) or part.isidentifier()) or None
    code = None
    if kind == "extra_forbidden":
        message = f"'{param}' is not supported{' yet' if where[0] in NOT_YET else ''}"
        code = "unsupported_parameter"
    elif kind == "missing":
        message, code = f"'{param}' is required", "missing_required_parameter"
    elif kind == "json_invalid":
        message = f"the body is not valid JSON ({first['msg']})"
    elif param is None:
        message = "the body must be a JSON object" if kind == "model_type" else first["msg"]
    else:
        message = f"'{param}': {first['msg'][:1].lower()}{first['msg'][1:]}"
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def add_handlers(app: FastAPI) -> None:
    """Answer errors of routes in OpenAI's shape."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def answer_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase.lower()}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    for kind in (ApiError, Disconnected, InputError, ValidationError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(HTTPException, answer_http)


class Failures:
    """Middleware that answers an unexpected exception with status 500, without a traceback.

    Only the server cancels a request that has not ended: when it shuts down.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            if scope["type"] == "http" and not started:
                await shutting_down().response()(scope, receive, send)
            raise
        except Exception as error:
            if scope["type"] != "http":
                raise
            failure = as_api_error(error).response()
            if not started:
                await failure(scope, receive, send)
