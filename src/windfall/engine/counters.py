"""Counts what the requests of an engine do, as plain numbers: cheap enough for every round, and read without a lock."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from windfall.core.step import Counts, Step
from windfall.engine.handle import CANCELLED, DEADLINE, Progress
from windfall.engine.use import Use

FAILED = "error"  # the finish reason of a request that failed
REASONS = ("stop", "length", DEADLINE, CANCELLED, FAILED)
MILLISECONDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000, 60_000, 120_000, 300_000)
SECONDS = tuple(each / 1000 for each in MILLISECONDS)
TOKEN_SECONDS = tuple(each / 1000 for each in (0.1, 0.2, 0.5, *MILLISECONDS[:12]))
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # tokens that a cycle adds to a text
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # of a verify pass


class Histogram:
    """How many values lie in each interval. One thread adds; any thread may read."""

    def __init__(self, bounds: Sequence[float]):
        """`bounds`: the upper bounds of the intervals, ascending; the last interval has none."""
        self.bounds, self.counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += times * value

    @property
    def cumulative(self) -> list[int]:
        """The number of values up to each bound, and of all values."""
        return list(accumulate(self.counts))


class Counters:
    """Numbers of all requests since the engine was made. The scheduler's thread counts; any thread may read."""

    def __init__(self) -> None:
        self.prompt_tokens = self.tokens = 0  # of requests that began, and generated
        self.rounds = self.draft_passes = 0  # a round has one verify pass
        self.drafts = 0  # cycles of requests in which drafted tokens were verified
        self.verified = self.accepted = 0  # drafted tokens
        self.accepted_by_depth: Counter[int] = Counter()  # cycles that accepted a token at this depth, from 1
        self.preemptions = 0
        self.first_token, self.between_tokens = Histogram(SECONDS), Histogram(TOKEN_SECONDS)  # seconds
        self.durations = {reason: Histogram(SECONDS) for reason in REASONS}  # seconds of requests, by finish reason
        self.lengths, self.rows = Histogram(LENGTHS), Histogram(ROWS)  # tokens per cycle, rows per pass
        self.use = Use()  # of the last round

    def add_round(self, steps: Sequence[tuple[Progress, Step]], counts: Sequence[Counts], use: Use, now: float) -> None:
        """Count a round that has ended now; `counts`: of each Step. The requests do not have these Steps yet.

        Requests whose Steps are alike are counted together: most had their last Step at the same time.
        """
        self.use = use
        if not steps:
            return
        self.rounds += 1
        last_moments = [request.moments[-1] if request.moments else None for request, _ in steps]
        alike = Counter(zip(last_moments, counts, strict=True))
        rows = passes = 0
        for (last, (tokens, own_rows, accepted, _, own_passes)), times in alike.items():
            passes = max(passes, own_passes)
            rows += times * own_rows
            self.tokens += times * tokens
            self.lengths.add(tokens, times)
            if last is not None:
                self.between_tokens.add((now - last) / max(tokens, 1), times * tokens)
            if own_rows > 1:
                self._add_drafts(own_rows - 1, min(accepted, tokens), times)
        self.rows.add(rows)
        self.draft_passes += passes
        for request, step in steps:
            if not request.moments:
                self.first_token.add(now - request.created)
                self.prompt_tokens += request.prompt_tokens
            if step.finish is not None:
                self.add_end(request, step.finish)

    def _add_drafts(self, verified: int, accepted: int, times: int) -> None:
        """Steps in which these drafted tokens were verified."""
        self.drafts += times
        self.verified += times * verified
        self.accepted += times * accepted
        for depth in range(1, accepted + 1):
            self.accepted_by_depth[depth] += times

    def add_end(self, request: Progress, reason: str) -> None:
        """Count the end of a request."""
        self.durations.setdefault(reason, Histogram(SECONDS)).add(time.perf_counter() - request.created)
