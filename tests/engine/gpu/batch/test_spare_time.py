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


def rounds(clock: Clock, spare: SpareTime, wait: float, count: int = 1) -> None:
    """Rounds in which the host waits this long for results."""
    for _ in range(count):
        ready = clock.now + wait
        spare.use(lambda ready=ready: clock.now < ready)  # type: ignore[misc]
        clock.now = max(clock.now, ready)
        spare.results_came()
        clock.now += ROUND - wait


def test_pieces_end_before_the_results_come(clock: Clock) -> None:
    spare, done = SpareTime(), list[int]()
    rounds(clock, spare, 2.5 * PIECE, 50)  # until it knows the wait
    spare.add("lesson", pieces(clock, done, 99))
    rounds(clock, spare, 2.5 * PIECE, 15)  # and how long a piece takes
    spare._allowed, before = -ROUND, len(done)  # no round may be delayed
    for count in (2, 4, 6):
        rounds(clock, spare, 2.5 * PIECE)
        assert len(done) == before + count


def test_a_piece_that_is_longer_than_the_wait_hardly_delays_rounds(clock: Clock) -> None:
    spare, done, count = SpareTime(), list[int](), 5000
    spare.add("lesson", pieces(clock, done, count))
    rounds(clock, spare, 0.5 * PIECE, count)
    assert 0 < len(done) * PIECE / clock.now < 1.1 * DELAY


def test_the_wait_is_learned_anew(clock: Clock) -> None:
    spare, done = SpareTime(), list[int]()
    rounds(clock, spare, 4 * PIECE, 50)
    rounds(clock, spare, 0.0, 50)
    spare._allowed = -ROUND
    spare.add("lesson", pieces(clock, done, 9))
    rounds(clock, spare, 4 * PIECE)
    assert done == [0]  # it is not known yet how long a piece takes
    rounds(clock, spare, 4 * PIECE, 20)
    assert done == [*range(9)]


def test_works_follow_each_other(clock: Clock) -> None:
    spare, first, second = SpareTime(), list[int](), list[int]()
    rounds(clock, spare, 4 * PIECE, 50)
    spare._allowed = -ROUND
    spare.add("lesson", pieces(clock, first, 2))
    spare.add("sizes", pieces(clock, second, 2))
    rounds(clock, spare, 2.5 * PIECE)
    assert first == [0, 1] and second == [0]


def test_a_host_that_never_waits_works_for_a_fiftieth_of_the_time(clock: Clock) -> None:
    spare, done, count = SpareTime(), list[int](), 5000
    spare.add("lesson", pieces(clock, done, count))
    rounds(clock, spare, 0.0, count)
    assert len(done) * PIECE / clock.now == pytest.approx(DELAY, rel=0.05)


def test_rounds_without_work_do_not_save_up_a_long_delay(clock: Clock) -> None:
    spare, done = SpareTime(), list[int]()
    rounds(clock, spare, 0.0, 5000)
    spare.add("lesson", pieces(clock, done, 100))
    spare.use(lambda: False)
    assert len(done) <= 6
