"""Work that the host does in pieces while it would wait for the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from windfall.engine.gpu.batch import learning
from windfall.engine.gpu.batch.learning import DELAY, SpareTime

PIECE, ROUND = 0.0002, 0.001


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(learning, "time", made)
    return made


def pieces(clock: Clock, done: list[int], count: int) -> Iterator[None]:
    for number in range(count):
        clock.now += PIECE
        done.append(number)
        yield


def test_work_goes_on_while_the_host_waits_and_stops_when_the_results_come(clock: Clock) -> None:
    spare, done, ready = SpareTime(), list[int](), 0.0
    spare.add(pieces(clock, done, 9))
    ready = clock.now + 2.5 * PIECE
    spare.use(lambda: clock.now < ready)
    assert done == [0, 1, 2] and len(spare) == 1
    ready = clock.now + ROUND * 9
    spare.use(lambda: clock.now < ready)
    assert done == [*range(9)] and not len(spare)


def test_works_follow_each_other(clock: Clock) -> None:
    spare, first, second = SpareTime(), list[int](), list[int]()
    spare.add(pieces(clock, first, 2))
    spare.add(pieces(clock, second, 2))
    spare.use(lambda: len(second) < 1)
    assert first == [0, 1] and second == [0]


def test_a_host_that_never_waits_works_for_a_fiftieth_of_the_time(clock: Clock) -> None:
    spare, done, rounds = SpareTime(), list[int](), 5000
    spare.add(pieces(clock, done, rounds))
    for _ in range(rounds):
        clock.now += ROUND
        spare.use(lambda: False)
    assert len(done) * PIECE / clock.now == pytest.approx(DELAY, rel=0.05)


def test_rounds_without_work_do_not_save_up_a_long_delay(clock: Clock) -> None:
    spare, done = SpareTime(), list[int]()
    for _ in range(5000):
        clock.now += ROUND
        spare.use(lambda: False)
    spare.add(pieces(clock, done, 100))
    spare.use(lambda: False)
    assert len(done) <= 6
