"""Middleware that refuses requests without a key, and bodies that are too large."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windfall.serve.errors import ApiError

OPEN_PATHS = ("/health", "/ready")  # probes have no key


class KeyCheck:
    """Asks for `Authorization: Bearer KEY` with one of these keys, except on the open paths."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], open_paths: Iterable[str] = OPEN_PATHS):
        self.app, self._keys, self._open = app, [key.encode() for key in keys], frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or self._knows(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        refusal = ApiError(
            HTTPStatus.UNAUTHORIZED,
            "a valid API key is required: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        """Whether the header has one of the keys. All are compared, so that the time taken says nothing."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)


class BodyLimit:
    """Refuses bodies with more bytes than this, whether or not their length is announced."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self.max_bytes:
            await self._refusal.response()(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_bytes:
                raise self._refusal
            return message

        await self.app(scope, counted, send)

    @property
    def _refusal(self) -> ApiError:
        message = f"the body has more than {self.max_bytes} bytes"
        return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")
