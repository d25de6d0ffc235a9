"""Ctrl-C at a time when the work is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block. Outside the main thread, which alone gets it, this does nothing."""
    own = signal.getsignal(signal.SIGINT)
    if own is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
    if pressed:
        signal.raise_signal(signal.SIGINT)
