"""One request to a server with the OpenAI API, and when its text came."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from windfall.core.errors import InputError

CONNECT_SECONDS = 10.0
DONE = b"[DONE]"
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "text")  # of a choice, or of its delta or message


@dataclass(frozen=True)
class Outcome:
    """A request that has ended. Times are those of the clock."""

    started: float
    ended: float
    first: float | None = None  # when the first text came; None: unknown
    tokens: int = 0  # generated
    prompt_tokens: int | None = None
    passes: int | None = None  # of the target, if the server tells
    counted: bool = True  # whether the server has counted the tokens; else they are pieces of the stream
    error: str | None = None  # the kind of error
    detail: str = ""  # what the server says about it

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text."""
        return None if self.first is None else self.first - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first text."""
        return None if self.first is None or self.tokens < 2 else (self.ended - self.first) / (self.tokens - 1)


class Client:
    """Sends requests to one server. A load test needs a client that is faster than the server, so it uses aiohttp."""

    def __init__(self, url: str, key: str | None, timeout: float):
        self.base = base_url(url)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=timeout)
        self._opened: aiohttp.ClientSession | None = None

    @property
    def _http(self) -> aiohttp.ClientSession:
        """Must be made while an event loop runs."""
        if self._opened is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._opened = aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=self._timeout)
        return self._opened

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def models(self) -> list[str]:
        """The names of the served models."""
        try:
            async with self._http.get(f"{self.base}/models", raise_for_status=True) as answer:
                return [each["id"] for each in json.loads(await answer.read())["data"]]
        except aiohttp.ClientResponseError as error:
            raise InputError(f"{self.base}/models answers with status {error.status}") from None
        except aiohttp.ClientConnectorError as error:
            number = error.errno or 0
            why = os.strerror(number) if number > 0 else error.strerror or error  # others are of the name's lookup
            raise InputError(f"cannot reach {self.base}: {why}; is the server running?") from None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise InputError(f"cannot reach {self.base}: {error or type(error).__name__}") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{self.base}/models does not list models as the OpenAI API does") from None

    async def send(self, route: str, body: dict[str, Any]) -> Outcome:
        """Send a request, and read its answer to the end; errors become an Outcome, too."""
        started = time.perf_counter()
        try:
            async with self._http.post(self.base + route, json=body) as answer:
                if answer.status != HTTPStatus.OK:
                    return _failed(started, f"status {answer.status}", _message(await answer.read()))
                if answer.content_type == "text/event-stream":
                    return await _read_stream(_lines(answer.content.iter_any()), started)
                return _read_whole(await answer.read(), started)
        except aiohttp.ClientConnectorError:
            return _failed(started, "no connection")
        except asyncio.TimeoutError:
            return _failed(started, "timeout")
        except (aiohttp.ClientError, OSError):
            return _failed(started, "connection lost")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return _failed(started, "unreadable answer")


def base_url(given: str) -> str:
    """The URL with the path /v1, unless it has a path."""
    try:
        parts = urlsplit(given.rstrip("/"))
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise InputError(f"a server's address is a URL such as http://127.0.0.1:8000/v1, not '{given}'")
    if parts.username or parts.password:
        raise InputError("give the key in an environment variable (--key-variable), not in the URL")
    return parts.geturl() if parts.path else f"{parts.geturl()}/v1"


def _failed(started: float, kind: str, detail: str = "") -> Outcome:
    return Outcome(started, time.perf_counter(), error=kind, detail=detail)


def _message(content: bytes) -> str:
    """The message of an error in OpenAI's shape, or in vLLM's older one."""
    try:
        answer = json.loads(content)
        return str(answer.get("error", answer)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    yield rest


async def _read_stream(lines: AsyncIterator[bytes], started: float) -> Outcome:
    first: float | None = None
    ended, pieces, finished, usage = started, 0, False, dict[str, Any]()
    async for line in lines:
        field, _, data = line.partition(b":")
        if field != b"data":
            continue
        if data.strip() == DONE:
            finished = True
            break
        event = json.loads(data)
        if event.get("error"):
            return _failed(started, "error in the stream")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            finished = finished or choice.get("finish_reason") is not None
            ended = time.perf_counter()
            if _has_text(choice.get("delta") or choice):
                first, pieces = first or ended, pieces + 1
    if not finished:
        return _failed(started, "connection lost")
    return _outcome(started, max(ended, started), first, usage, pieces)


def _read_whole(content: bytes, started: float) -> Outcome:
    answer = json.loads(content)
    pieces = sum(_has_text(choice.get("message") or choice) for choice in answer["choices"])
    return _outcome(started, time.perf_counter(), None, answer.get("usage") or {}, pieces)


def _has_text(part: dict[str, Any]) -> bool:
    return any(part.get(name) for name in TEXT_FIELDS) or bool(part.get("tool_calls"))


def _outcome(started: float, ended: float, first: float | None, usage: dict[str, Any], pieces: int) -> Outcome:
    tokens = usage.get("completion_tokens")
    passes = (usage.get("speculation") or {}).get("target_passes")
    return Outcome(
        started,
        ended,
        first,
        pieces if tokens is None else tokens,
        usage.get("prompt_tokens"),
        passes,
        tokens is not None,
    )
