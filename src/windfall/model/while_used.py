"""A change that lasts while any thread uses it, such as a replaced function of another library."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WhileUsed:
    """Calls `start` when the first block of all threads is entered, and `stop` when the last one is left."""

    def __init__(self, start: Callable[[], None], stop: Callable[[], None]):
        self._start, self._stop = start, stop
        self._lock, self._users = threading.Lock(), 0

    @contextmanager
    def block(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._start()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._stop()
