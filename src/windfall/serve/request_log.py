"""Middleware around all others: gives a request its id, and counts and logs its answer.

The log has numbers only: no prompts, texts or keys, and no paths that are not routes.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windfall.engine.counters import FAILED
from windfall.engine.handle import CANCELLED
from windfall.serve.errors import CLIENT_CLOSED_REQUEST
from windfall.serve.guard import OPEN_PATHS
from windfall.serve.texts import Texts

log = logging.getLogger(__name__)

ID_HEADER = "x-request-id"
ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # other ids of clients are replaced
PROBES = (*OPEN_PATHS, "/metrics", "/live", "/page/{name}")  # logged only if they fail
NO_ROUTE = "none"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # clients may send any word

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)  # of the request that is being answered
Count = Callable[[str, int], None]  # called with route and status


class RequestLog:
    """Logs one line for each answer, with its numbers as the attribute `fields` of the log record."""

    def __init__(self, app: ASGIApp, count: Count):
        self.app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), CLIENT_CLOSED_REQUEST
        given = Headers(scope=scope).get(ID_HEADER, "")
        own_id = given if ID.fullmatch(given) else uuid.uuid4().hex
        token = request_id.set(own_id)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = own_id
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            self._count(route, status)
            if (route not in PROBES or status >= 400) and log.isEnabledFor(logging.INFO):
                method = scope["method"] if scope["method"] in METHODS else "OTHER"
                seconds = round(time.perf_counter() - started, 6)
                _write(
                    {"request_id": own_id, "method": method, "route": route, "status": status, "seconds": seconds}
                    | numbers(scope.get("state", {}).get("texts"))
                )
            request_id.reset(token)


def numbers(texts: Texts | None) -> dict[str, Any]:
    """What is logged about the texts of a request, as far as they were generated."""
    if texts is None:
        return {}
    totals, begun = texts.totals, [each.ttft for each in texts.handles if each.ttft is not None]
    reasons = dict.fromkeys(each.finish_reason or (FAILED if each.done else CANCELLED) for each in texts.handles)
    return {
        "texts": len(texts),
        "prompt_tokens": texts.prompt_tokens,
        "completion_tokens": totals.tokens,
        "finish_reason": ",".join(reasons),
        "ttft_seconds": round(min(begun), 6) if begun else None,
        "accepted_length": round(totals.tokens / totals.cycles, 4) if totals.cycles else None,
    }


def _write(fields: dict[str, Any]) -> None:
    shown = dict(fields)
    start = " ".join(str(shown.pop(name)) for name in ("method", "route", "status"))
    rest = " ".join(f"{name}={value}" for name, value in shown.items() if value is not None)
    log.info("%s", f"{start} {rest}", extra={"fields": fields})
