"""Ctrl-C waits for the end of a block."""

from __future__ import annotations

import signal
import threading

import pytest

from windfall.core.interrupts import uninterrupted


def test_ctrl_c_waits_for_the_end_of_the_block() -> None:
    done = []

    def work() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_errors_and_other_threads_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="mine"), uninterrupted():
        raise ValueError("mine")
    done = []

    def work() -> None:
        with uninterrupted():
            done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done and signal.getsignal(signal.SIGINT) is before
