"""Calls from the engine's thread into an asyncio event loop, which is woken once for many calls: that is slow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary


class LoopCalls:
    """Calls that one event loop has to make."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        self._woken = False  # whether the loop will make the calls

    def add(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        """Let the loop make this call, unless it is closed."""
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._make)

    def _make(self) -> None:
        self._woken = False  # first: calls that are added from now on may be too late for this time
        while self._calls:
            self._calls.popleft()()


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopCalls] = WeakKeyDictionary()


def call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Let this loop make a call soon; any thread may ask."""
    known = _of_loops.get(loop)
    if known is None:
        known = _of_loops.setdefault(loop, LoopCalls())
    known.add(loop, call)
