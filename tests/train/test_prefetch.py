"""Items that a background thread prepares: their order, their number, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from windfall.train.prefetch import prefetch


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_items_come_in_order_and_are_made_by_one_other_thread() -> None:
    makers = []

    def items() -> Iterator[int]:
        for item in range(50):
            makers.append(threading.current_thread())
            yield item

    assert list(prefetch(items())) == list(range(50))
    assert {*makers} != {threading.current_thread()} and len({*makers}) == 1 and not threads()


def test_only_a_few_items_are_made_before_they_are_needed() -> None:
    made = []
    enough = threading.Event()

    def items() -> Iterator[int]:
        while True:
            made.append(len(made))
            if len(made) == 4:
                enough.set()
            yield made[-1]

    with closing(prefetch(items(), ahead=3)) as found:
        assert next(found) == 0 and enough.wait(10)
    assert len(made) == 4, "the one that was used, and three more"


def test_an_error_is_raised_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield from (0, 1)
        raise ValueError("a damaged text")

    found = prefetch(items())
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(ValueError, match="a damaged text"):
        next(found)
    assert not threads()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_thread_ends_with_its_user(error: type[BaseException]) -> None:
    with suppress(error), closing(prefetch(iter(range(10**9)))) as found:
        assert next(found) == 0 and threads()
        raise error
    assert not threads()
