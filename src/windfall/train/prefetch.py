"""Prepare the next items of an iterator in a background thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
AHEAD = 2  # items


def prefetch(items: Iterator[T], ahead: int = AHEAD) -> Generator[T, None, None]:
    """The items in their order; up to `ahead` of them are prepared while the caller uses the one before.

    Errors are raised where their item would come. The thread ends with this iterator: at the last item or an error, or
    when the iterator is closed.
    """
    end = object()
    with ThreadPoolExecutor(1, "prefetch") as thread:  # one thread takes the items one after the other
        waiting = deque(thread.submit(next, items, end) for _ in range(ahead))
        try:
            while (item := waiting.popleft().result()) is not end:
                waiting.append(thread.submit(next, items, end))
                yield item  # type: ignore[misc]
        finally:
            for each in waiting:
                each.cancel()
