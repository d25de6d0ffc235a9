"""The answers of one run, when their tokens came, and the figures that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from windfall.core.types import Split
from windfall.engine.request import Handle


class Part(NamedTuple):
    """The tokens of an answer that came at the same time: those of a Step, or one token of transformers."""

    time: float  # of the clock
    tokens: int
    rows: int = 1  # verified
    passes: int = 0  # draft passes
    seconds: Split | None = None  # of the round
    recorded: bool = False  # whether the round captured a graph


@dataclass(frozen=True)
class Answer:
    """One request. `parts` is empty if only its end is known."""

    tokens: tuple[int, ...]
    submitted: float  # time of the clock
    ended: float
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, handle: Handle, submitted: float) -> Answer:
        """Of a request that has ended; raises its error if it failed."""
        steps = list(handle)
        parts = tuple(
            Part(handle.created + at, len(step.tokens), step.rows, step.draft_passes, step.seconds, step.recorded)
            for step, at in zip(steps, handle.times, strict=True)
        )
        return cls(tuple(token for step in steps for token in step.tokens), submitted, parts[-1].time, parts)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.parts[0].time - self.submitted if self.parts else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first."""
        later = len(self.tokens) - 1
        return (self.parts[-1].time - self.parts[0].time) / later if self.parts and later else None


@dataclass(frozen=True)
class Run:
    """All answers of a run, by prompt, and the times between which tokens count."""

    answers: list[Answer]
    windows: list[tuple[float, float]]

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self.windows)

    @property
    def counted(self) -> list[list[Part]]:
        """Of each answer the parts that count."""
        return [[part for part in each.parts if self._counts(part.time)] for each in self.answers]

    @property
    def tokens(self) -> int:
        """Tokens that count; those of answers without parts come at their end."""
        known = sum(part.tokens for own in self.counted for part in own)
        return known + sum(len(each.tokens) for each in self.answers if not each.parts and self._counts(each.ended))

    def _counts(self, time: float) -> bool:
        return any(start < time <= end for start, end in self.windows)

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None


def rounds_of(answers: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """The parts of all answers that came from one round of the batch, for each round; not those of transformers.

    All Steps of a round report the same seconds, and a request has one Step in a round.
    """
    steps = sorted(
        ((part, number) for number, own in enumerate(answers) for part in own if part.seconds is not None),
        key=lambda each: each[0].time,
    )
    rounds: list[list[Part]] = []
    members: set[int] = set()
    for part, number in steps:
        if not rounds or part.seconds != rounds[-1][0].seconds or number in members:
            rounds.append([])
            members = set()
        rounds[-1].append(part)
        members.add(number)
    return rounds


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """Tokens per second as the median of the runs, times of all their requests, and sizes of all their rounds."""
    rounds = [each for run in runs for each in rounds_of(run.counted)]
    steps, wall = [part for each in rounds for part in each], sum(run.seconds for run in runs)
    passes = sum(each[0].seconds.passes for each in rounds if each[0].seconds is not None)
    answers = [answer for run in runs for answer in run.answers]
    speeds = [run.tokens_per_second for run in runs if run.tokens_per_second is not None]
    return {
        "tokens_per_second": median(speeds) if speeds else None,
        "tokens": sum(run.tokens for run in runs),
        "seconds": wall,
        "requests": len(answers),
        "ttft": spread([answer.ttft for answer in answers]),
        "tpot": spread([answer.tpot for answer in answers]),
        "tau": sum(part.tokens for part in steps) / len(steps) if steps else None,
        "rows_per_pass": sum(part.rows for part in steps) / len(rounds) if rounds else None,
        "requests_per_pass": len(steps) / len(rounds) if rounds else None,
        "draft_passes": sum(max(part.passes for part in each) for each in rounds) / len(rounds) if rounds else None,
        "captures": sum(any(part.recorded for part in each) for each in rounds),
        "rest_share": max(1 - passes / wall, 0.0) if rounds and wall else None,
    }


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Median and 95th percentile of the known values."""
    known = [value for value in values if value is not None]
    return {"median": median(known), "p95": float(np.percentile(known, 95))} if known else None
