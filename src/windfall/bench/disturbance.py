"""Whether something else used the machine while plain decoding ran: then its times, and all speed-ups, are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from windfall.bench.reading import ALL, Record, Run
from windfall.bench.results import PLAIN, Row
from windfall.costs.curves import Costs

SLOWED = 1.5  # times as long as they should take: from here on, plain decoding's steps were disturbed
BEYOND = 1.25  # times tokens per pass: no method can have a higher speed-up, even with free draft passes
FEWEST = 4  # conversations whose median says what is usual


class Disturbance(NamedTuple):
    """Evidence that plain decoding was slowed down at a temperature."""

    temperature: float
    factor: float  # how many times too long its steps took, at the least
    evidence: str

    @property
    def warning(self) -> str:
        return f"plain decoding was disturbed: {self.evidence}; speed-ups are not to be believed"


def disturbances(run: Run, rows: Sequence[Row]) -> list[Disturbance]:
    """One for each temperature at which plain decoding was disturbed; `rows` is the summary of the run."""
    found = []
    for heat in run.temperatures:
        plain = [record for record in run.select(PLAIN, None, heat) if record.seconds is not None]
        known = [_beside_profile(run, plain), _beside_usual(plain), _beside_tokens(rows, heat)]
        if told := next((each for each in known if each is not None), None):
            found.append(Disturbance(heat, *told))
    return found


Evidence = tuple[float, str]


def _beside_profile(run: Run, plain: Sequence[Record]) -> Evidence | None:
    """Plain steps beside what the run's cost profile says of a pass over one row; of several, the slowest counts."""
    step = step_seconds(plain)
    if step is None or not run.profiles:
        return None
    length = round(fmean(turn.prompt_tokens + turn.tokens / 2 for record in plain for turn in record.turns))
    try:
        costs = [Costs.of_dict(profile["costs"]) for profile in run.profiles.values()]
    except (ValueError, KeyError, TypeError):
        return None
    expected = max(each.verify(1, length) + each.overhead for each in costs)
    factor = step / expected if expected else 0.0
    return (factor, f"its steps took {factor:.1f} times what the profile says") if factor > SLOWED else None


def _beside_usual(plain: Sequence[Record]) -> Evidence | None:
    """All plain steps beside those of the median conversation."""
    each = [step for record in plain if (step := step_seconds([record])) is not None]
    step = step_seconds(plain)
    if step is None or len(each) < FEWEST:
        return None
    factor = step / median(each)
    told = f"its steps took {factor:.1f} times what they took in its median conversation"
    return (factor, told) if factor > SLOWED else None


def _beside_tokens(rows: Sequence[Row], heat: float) -> Evidence | None:
    """Speed-ups beside tokens per target pass, which they cannot exceed: a pass over a tree is no cheaper than one over
    a single row."""
    own = [row for row in rows if row.temperature == heat and row.method != PLAIN and row.speedup is not None]
    pooled = [row for row in own if row.task == ALL] or own
    worst = max(pooled, key=lambda row: row.speedup.low / row.tau if row.speedup else 0.0, default=None)
    if worst is None or worst.speedup is None or worst.speedup.low <= BEYOND * worst.tau:
        return None
    told = (
        f"{worst.method}'s speed-up of {worst.speedup.value:.2f} is more than its {worst.tau:.2f} tokens per pass allow"
    )
    return worst.speedup.low / worst.tau, told


def step_seconds(records: Sequence[Record]) -> float | None:
    """Seconds of a cycle without the prefill; None where nothing was timed."""
    timed = [turn for record in records for turn in record.turns if turn.seconds is not None]
    cycles = sum(turn.cycles for turn in timed)
    return sum((turn.seconds or 0.0) - (turn.prefill or 0.0) for turn in timed) / cycles if cycles else None
