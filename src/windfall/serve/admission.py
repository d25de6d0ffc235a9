"""Admission: submits texts to the engine, and refuses them if too many wait."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from windfall.core.wording import counted
from windfall.engine.engine import Engine, Prompt
from windfall.engine.request import Handle
from windfall.serve.errors import ApiError, shutting_down
from windfall.serve.settings import Settings

RETRY_AFTER_SECONDS = 1


@dataclass(frozen=True)
class Job:
    """A text to be generated."""

    prompt: Prompt
    raw: bool  # whether the chat template is left out
    sampling: dict[str, Any]


class Admission:
    """Counts the texts that run or wait. Prompts are tokenized in a thread, one after another."""

    def __init__(self, engine: Engine, settings: Settings):
        self.engine, self.settings = engine, settings
        self.capacity = engine.max_requests + settings.max_queue
        self.closed = False
        self._open = 0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "windfall-submit")

    @property
    def running(self) -> int:
        """Texts that run, if all fit into the memory."""
        return min(self._open, self.engine.max_requests)

    @property
    def waiting(self) -> int:
        """Texts that wait for a place."""
        return self._open - self.running

    async def submit(self, jobs: list[Job]) -> list[Handle]:
        """Submit all of these texts, or none if one is refused. If the caller is cancelled, so are the texts."""
        if self.closed:
            raise shutting_down()
        self._enter(len(jobs))
        submitted = self._thread.submit(self._submit, jobs)
        try:
            return await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            if submitted.cancel():
                self._leave(len(jobs))
            else:
                submitted.add_done_callback(_cancel)
            raise

    def close(self) -> None:
        """Accept no more texts."""
        self.closed = True
        self._thread.shutdown(wait=False)

    def _submit(self, jobs: list[Job]) -> list[Handle]:
        handles: list[Handle] = []
        try:
            for job in jobs:
                timeout = self.settings.request_timeout
                handles.append(self.engine.submit(job.prompt, raw=job.raw, deadline=timeout, **job.sampling))
        except BaseException:
            self._leave(len(jobs) - len(handles))
            for handle in handles:
                handle.cancel()
            raise
        finally:
            for handle in handles:
                handle.add_done_callback(lambda _: self._leave(1))
        return handles

    def _enter(self, texts: int) -> None:
        if texts > self.capacity:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"the request asks for {texts} texts at once; this server takes at most {self.capacity}",
            )
        with self._lock:
            if self._open + texts <= self.capacity:
                self._open += texts
                return
        raise ApiError(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"{counted(self.waiting, 'text')} already waiting; try again later",
            "rate_limit_error",
            code="queue_full",
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )

    def _leave(self, texts: int) -> None:
        with self._lock:
            self._open -= texts


def _cancel(submitted: Future[list[Handle]]) -> None:
    with suppress(Exception):
        for handle in submitted.result():
            handle.cancel()
