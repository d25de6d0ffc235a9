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


class Stopped(Exception):
    """Ends a generation that its caller has cancelled."""


class Stop:
    """Tells the thread to stop. `check` is to be called at every step."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        if self._event.is_set():
            raise Stopped


class Background:
    """Calls wait in line for the one thread. A call that is cancelled in line never starts; a running one stops at its
    next step."""

    def __init__(self, device: torch.device):
        begin = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else (lambda: None)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="windfall", initializer=begin)

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        return self._pool.submit(contextvars.copy_context().run, call)

    async def run(self, call: Callable[[Stop], T]) -> T:
        """What the call returns."""
        stop = Stop()
        try:
            return await asyncio.wrap_future(self._submit(lambda: call(stop)))
        finally:
            stop.set()

    async def iterate(self, make: Callable[[], Generator[T, None, None]]) -> AsyncGenerator[T, None]:
        """The items of a generator that the thread makes and goes through."""
        stop, loop = Stop(), asyncio.get_running_loop()
        queue: asyncio.Queue[T | Future[None]] = asyncio.Queue()

        def put(item: T | Future[None]) -> None:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def work() -> None:
            stop.check()
            with closing(make()) as items:  # here and now: it may hold a lock, which belongs to this thread
                for item in items:
                    put(item)
                    stop.check()

        future = self._submit(work)
        future.add_done_callback(put)  # in the queue after the last item
        try:
            while not isinstance(item := await queue.get(), Future):
                yield item
            item.result()
        finally:
            stop.set()
            future.cancel()
