"""From which rounds acceptance is learned: as many as the host has time for."""

from __future__ import annotations

import pytest

from windfall.engine.gpu.batch.learning import DELAY, FEWEST, MOST, Lessons

ROUND, LESSON = 0.001, 0.0015


@pytest.mark.parametrize(
    ("waits", "share"),
    [(0.0, DELAY * ROUND / LESSON), (0.0013, DELAY * ROUND / 0.0002), (0.002, MOST), (-0.02, FEWEST)],
    ids=["none", "some", "enough", "long lessons"],
)
def test_learning_delays_rounds_by_a_fiftieth(waits: float, share: float) -> None:
    lesson = LESSON if waits >= 0 else LESSON - waits
    lessons, drawn, rounds = Lessons(), 0, 8000
    for _ in range(rounds):
        learns = lessons.drawn()
        drawn += learns
        if learns:
            lessons.add_lesson(lesson)
        late = lesson > waits and learns
        lessons.add_round(0.0 if late else max(waits, 0.0), ROUND + (lesson - waits) * late)
    assert drawn / rounds == pytest.approx(share, rel=0.25)
