"""Requests to an application of Ray Serve that runs in this process.

Ray copies the arguments of a call. Functions of a module are copied by name, so what they keep is in this module.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

_body: list[bytes] = []
_sent: list[dict[str, Any]] = []


async def receive() -> dict[str, Any]:
    if not _body:
        await asyncio.Event().wait()  # the client stays connected
    return {"type": "http.request", "body": _body.pop(), "more_body": False}


async def send(message: dict[str, Any]) -> None:
    _sent.append(message)


def ask(handle: Any, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer."""
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.1", "scheme": "http", "method": method, "path": path}
    scope |= {"raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers}
    _sent.clear()
    _body[:] = [b"" if body is None else json.dumps(body).encode()]
    handle.remote(scope, receive, send).result(timeout_s=60)
    start, *rest = _sent
    got = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], got, b"".join(each["body"] for each in rest)
