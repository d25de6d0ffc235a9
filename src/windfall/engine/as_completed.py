"""Submit requests from a queue, and get their texts in the order in which they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from windfall.engine.engine import Engine
from windfall.engine.generation import Generation
from windfall.engine.request import Handle

SUBMITTED_SHARE = 2  # submitted requests, as a multiple of those that run together

T = TypeVar("T")


def as_completed(
    engine: Engine, queue: deque[T], submit: Callable[[T], Handle]
) -> Generator[tuple[T, Generation], None, None]:
    """Submit each item of the queue; yield it with its text when that has ended.

    The caller may add items to the queue meanwhile. Few requests are submitted ahead, so an item that is put first in
    the queue runs soon. A request that fails raises its error here. Closing the generator cancels the other requests.
    """
    ended: SimpleQueue[tuple[T, Handle]] = SimpleQueue()
    submitted: dict[int, Handle] = {}

    def end(item: T, handle: Handle) -> None:
        ended.put((item, handle))

    try:
        while queue or submitted:
            while queue and len(submitted) < SUBMITTED_SHARE * engine.max_requests:
                item = queue.popleft()
                handle = submit(item)
                submitted[handle.id] = handle
                handle.add_done_callback(partial(end, item))
            item, handle = ended.get()
            del submitted[handle.id]
            yield item, handle.result()
    finally:
        for handle in submitted.values():
            handle.cancel()
