"""The places of a server: a bounded number of texts may run or wait."""

from __future__ import annotations

import threading
from http import HTTPStatus

from windfall.core.wording import counted
from windfall.engine.handle import Handle
from windfall.serve.errors import ApiError, too_busy


class Places:
    """Counts the texts that run or wait. Any thread may ask."""

    def __init__(self, max_requests: int, max_queue: int):
        """`max_requests`: texts that run together."""
        self.max_requests, self.capacity = max_requests, max_requests + max_queue
        self._expected = 0  # texts that are about to be submitted
        self._handles: dict[int, Handle] = {}  # of texts that have not ended, or only just
        self._lock = threading.Lock()

    @property
    def expected(self) -> int:
        """Texts that have entered and are not submitted yet, for example because their prompts are being tokenized."""
        return self._expected

    @property
    def taken(self) -> int:
        """Texts that run or wait, the expected ones included."""
        with self._lock:
            return self._count()

    def enter(self, texts: int) -> None:
        """Expect these texts, or refuse them. Then `fill` or `leave` must be called."""
        if texts > self.capacity:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"the request asks for {texts} texts at once; this server takes at most {self.capacity}",
            )
        with self._lock:
            count = self._expected + len(self._handles)
            if count + texts > self.capacity:
                count = self._count()  # takes longer
            if count + texts <= self.capacity:
                self._expected += texts
                return
        running = min(count, self.max_requests)
        raise too_busy(f"the queue is full: {counted(running, 'text')} in progress, {count - running} waiting")

    def fill(self, handles: list[Handle], entered: int) -> None:
        """Count these texts, until they end, in the place of those that have entered."""
        with self._lock:
            self._expected -= entered
            self._handles.update({handle.id: handle for handle in handles})
        for handle in handles:
            handle.add_done_callback(self._end)

    def leave(self, entered: int) -> None:
        """Expect these texts no longer."""
        self.fill([], entered)

    def _end(self, handle: Handle) -> None:
        with self._lock:
            self._handles.pop(handle.id, None)

    def _count(self) -> int:
        return self._expected + sum(not handle.done for handle in self._handles.values())
