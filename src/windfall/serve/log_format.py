"""Writes the logs of a server as text or as one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import TextIO

from windfall.core.errors import InputError
from windfall.serve.request_log import request_id

TEXT, JSON, NONE = "text", "json", "none"
FORMATS = (TEXT, JSON, NONE)
REQUESTS, OTHERS = "windfall.serve.request_log", ("windfall", "uvicorn")  # names of loggers


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")


class TextLines(logging.Formatter):
    """Time and message; warnings and errors with their level and the id of the request."""

    def format(self, record: logging.LogRecord) -> str:
        if hasattr(record, "fields"):
            return f"{_time(record)} {record.getMessage()}"
        own = request_id.get()
        return f"{_time(record)} {record.levelname} {record.getMessage()}{f' request_id={own}' if own else ''}"


class JsonLines(logging.Formatter):
    """One object per record: the numbers of a request, or a message."""

    def format(self, record: logging.LogRecord) -> str:
        about = {"time": _time(record), "level": record.levelname.lower()}
        if fields := getattr(record, "fields", None):
            return json.dumps({**about, "event": "request", **fields})
        own = request_id.get()
        more = {} if own is None else {"request_id": own}
        return json.dumps({**about, "event": "message", "message": record.getMessage(), **more})


class _Handler(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore errors while writing: the server goes on if its output was closed."""


def check(given: str) -> str:
    if given not in FORMATS:
        raise InputError(f"--log-format takes {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, not '{given}'")
    return given


@contextmanager
def logging_as(form: str) -> Iterator[None]:
    """In this block, requests are logged on stdout, and warnings and errors on stderr; `none`: only the latter."""
    formatter = JsonLines() if form == JSON else TextLines()
    added: list[tuple[logging.Logger, logging.Handler]] = []

    def add(name: str, stream: TextIO) -> logging.Logger:
        logger, handler = logging.getLogger(name), _Handler(stream)
        handler.setFormatter(formatter)
        logger.addHandler(handler)
        added.append((logger, handler))
        return logger

    for name in OTHERS:
        add(name, sys.stderr)
    requests = logging.getLogger(REQUESTS) if form == NONE else add(REQUESTS, sys.stdout)
    before = requests.level, requests.propagate
    requests.setLevel(logging.WARNING if form == NONE else logging.INFO)
    requests.propagate = form == NONE
    try:
        yield
    finally:
        requests.setLevel(before[0])
        requests.propagate = before[1]
        for logger, handler in added:
            with suppress(Exception):
                handler.flush()
            logger.removeHandler(handler)
