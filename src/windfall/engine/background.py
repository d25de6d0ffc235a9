"""A thread that runs an engine's generations for asyncio, one after another."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import TypeVar

import torch

T = TypeVar("T")
Check = Callable[[], None]  # raises Stopped if the caller has cancelled; to be called at every step


class Stopped(Exception):
    """Ends a generation that its caller has cancelled."""


class Background:
    """Calls wait in a queue for the one thread. A call that is cancelled in the queue never starts; a running one stops
    at its next step."""

    def __init__(self, device: torch.device):
        begin = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else (lambda: None)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="windfall", initializer=begin)

    def _submit(self, call: Callable[[Check], T]) -> tuple[Future[T], threading.Event]:
        """Start this call in the thread; setting the event cancels it."""
        cancelled = threading.Event()

        def check() -> None:
            if cancelled.is_set():
                raise Stopped

        def work() -> T:
            check()
            return call(check)

        return self._pool.submit(contextvars.copy_context().run, work), cancelled

    def close(self) -> None:
        """Drop the calls that wait, and end the thread after the current call."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, call: Callable[[Check], T]) -> T:
        """The result of the call."""
        future, cancelled = self._submit(call)
        try:
            return await asyncio.wrap_future(future)
        finally:
            cancelled.set()

    async def iterate(self, make: Callable[[], Generator[T, None, None]]) -> AsyncGenerator[T, None]:
        """The items of a generator that the thread makes and iterates over."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[T | Future[None]] = asyncio.Queue()

        def put(item: T | Future[None]) -> None:
            with suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def work(check: Check) -> None:
            with closing(make()) as items:  # closed in this thread, which owns the lock that it may hold
                for item in items:
                    put(item)
                    check()

        future, cancelled = self._submit(work)
        future.add_done_callback(put)  # it is in the queue after the last item
        try:
            while not isinstance(item := await queue.get(), Future):
                yield item
            item.result()
        finally:
            cancelled.set()
            future.cancel()
