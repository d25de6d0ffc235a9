"""Detects whether other work slowed plain decoding down; then its times, and all speed-ups, are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from windfall.bench.reading import ALL, Record, Run
from windfall.bench.results import PLAIN, Row
from windfall.costs.curves import Costs

MAX_SLOWDOWN = 1.5  # of plain decoding's steps against the expected time
MAX_SPEEDUP_PER_TAU = 1.25  # a speed-up cannot exceed the tokens per pass, even with free draft passes
MIN_CONVERSATIONS = 4  # for a median


class Disturbance(NamedTuple):
    """Evidence that plain decoding was slowed down at a temperature."""

    temperature: float
    factor: float  # by which its steps were at least slowed down
    evidence: str

    @property
    def warning(self) -> str:
        return f"plain decoding was disturbed: {self.evidence}; speed-ups are not to be believed"


def disturbances(run: Run, rows: Sequence[Row]) -> list[Disturbance]:
    """One for each temperature at which plain decoding was disturbed; `rows` is the summary of the run."""
    found = []
    for temperature in run.temperatures:
        plain = [record for record in run.select(PLAIN, None, temperature) if record.seconds is not None]
        known = [_against_profile(run, plain), _against_median(plain), _against_tokens(rows, temperature)]
        if evidence := next((each for each in known if each is not None), None):
            found.append(Disturbance(temperature, *evidence))
    return found


Evidence = tuple[float, str]


def _against_profile(run: Run, plain: Sequence[Record]) -> Evidence | None:
    """Compare plain steps with the profiled cost of a pass over one row, the slowest of several profiles."""
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
    return (factor, f"its steps took {factor:.1f} times what the profile says") if factor > MAX_SLOWDOWN else None


def _against_median(plain: Sequence[Record]) -> Evidence | None:
    """Compare all plain steps with those of the median conversation."""
    each = [step for record in plain if (step := step_seconds([record])) is not None]
    step = step_seconds(plain)
    if step is None or len(each) < MIN_CONVERSATIONS:
        return None
    factor = step / median(each)
    evidence = f"its steps took {factor:.1f} times what they took in its median conversation"
    return (factor, evidence) if factor > MAX_SLOWDOWN else None


def _against_tokens(rows: Sequence[Row], temperature: float) -> Evidence | None:
    """Compare speed-ups with tokens per target pass, which they cannot exceed: a pass over a tree is not cheaper than
    one over a single row."""
    own = [row for row in rows if row.temperature == temperature and row.method != PLAIN and row.speedup is not None]
    pooled = [row for row in own if row.task == ALL] or own
    worst = max(pooled, key=lambda row: row.speedup.low / row.tau if row.speedup else 0.0, default=None)
    if worst is None or worst.speedup is None or worst.speedup.low <= MAX_SPEEDUP_PER_TAU * worst.tau:
        return None
    evidence = (
        f"{worst.method}'s speed-up of {worst.speedup.value:.2f} is more than its {worst.tau:.2f} tokens per pass allow"
    )
    return worst.speedup.low / worst.tau, evidence


def step_seconds(records: Sequence[Record]) -> float | None:
    """Seconds of a cycle without the prefill; None if nothing was timed."""
    timed = [turn for record in records for turn in record.turns if turn.seconds is not None]
    cycles = sum(turn.cycles for turn in timed)
    return sum((turn.seconds or 0.0) - (turn.prefill or 0.0) for turn in timed) / cycles if cycles else None
