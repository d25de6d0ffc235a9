"""The threads in which prompts are tokenized."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from windfall.engine.prompts import LONG_TEXT
from windfall.serve.errors import too_busy

T = TypeVar("T")

MAX_WAITING = 16 * 2**20  # characters of all long prompts together
RETRY_AFTER_SECONDS = 5


class PromptThreads:
    """One thread for short prompts, and one for long ones, which take seconds. Each takes one prompt after another."""

    def __init__(self) -> None:
        self._short, self._long = (
            ThreadPoolExecutor(1, "windfall-prompt"),
            ThreadPoolExecutor(1, "windfall-long-prompt"),
        )
        self._waiting = 0  # characters of the long prompts that wait or are being tokenized
        self._lock = threading.Lock()  # of this number

    def submit(self, characters: int, work: Callable[..., T], *given: Any) -> Future[T]:
        """Do this work, for a prompt of this size. If too many long prompts wait, another one is refused."""
        if characters <= LONG_TEXT:
            return self._short.submit(work, *given)
        with self._lock:
            if self._waiting and self._waiting + characters > MAX_WAITING:
                raise too_busy("too many other long prompts are being tokenized", RETRY_AFTER_SECONDS)
            self._waiting += characters
        submitted = self._long.submit(work, *given)
        submitted.add_done_callback(lambda _: self._leave(characters))
        return submitted

    async def run(self, characters: int, work: Callable[..., T], *given: Any) -> T:
        """The result of this work."""
        return await asyncio.wrap_future(self.submit(characters, work, *given))

    def _leave(self, characters: int) -> None:
        with self._lock:
            self._waiting -= characters
