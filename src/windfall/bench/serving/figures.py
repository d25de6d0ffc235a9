"""The figures of one run: percentiles of times, tokens per second, goodput and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from windfall.bench.serving.client import Outcome
from windfall.bench.serving.workload import Level, Settings

PERCENTILES = (50, 90, 99)


def figures(level: Level, outcomes: Sequence[Outcome], settings: Settings, asked: int) -> dict[str, Any]:
    """The row of a run. Rates are relative to the time from the first request to the end of the last.

    asked: the requests of a whole run; there are fewer outcomes if it was stopped.
    """
    good = [each for each in outcomes if each.error is None]
    wall = max(each.ended for each in outcomes) - min(each.started for each in outcomes) if outcomes else 0.0
    passes = [(each.tokens, each.passes) for each in good if each.passes]
    met = [each for each in good if meets(each, settings)]
    return {
        "load": level.label,
        "concurrency": level.clients,
        "rate": level.rate,
        "requests": len(outcomes),
        "complete": len(outcomes) == asked,
        "seconds": wall,
        "errors": dict(Counter(each.error for each in outcomes if each.error is not None)),
        "tokens": sum(each.tokens for each in good),
        "prompt_tokens": sum(each.prompt_tokens or 0 for each in good),
        "tokens_counted": all(each.counted for each in good),
        "tokens_per_second": _per_second(sum(each.tokens for each in good), wall),
        "requests_per_second": _per_second(len(good), wall),
        "ttft": percentiles([each.ttft for each in good]),
        "tpot": percentiles([each.tpot for each in good]),
        "latency": percentiles([each.seconds for each in good]),
        "goodput": _per_second(len(met), wall) if settings.ttft_ms or settings.tpot_ms else None,
        "goodput_share": len(met) / len(outcomes) if outcomes and (settings.ttft_ms or settings.tpot_ms) else None,
        "accepted_length": sum(t for t, _ in passes) / sum(p for _, p in passes) if passes else None,
    }


def meets(outcome: Outcome, settings: Settings) -> bool:
    """Whether an answer came within the limits. A text of one token has no time per token and meets that limit."""
    ttft, tpot = outcome.ttft, outcome.tpot
    slow_start = settings.ttft_ms is not None and (ttft is None or 1000 * ttft > settings.ttft_ms)
    return not slow_start and (settings.tpot_ms is None or tpot is None or 1000 * tpot <= settings.tpot_ms)


def percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean and percentiles of the known values, in seconds."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    found = {f"p{each}": float(np.percentile(known, each)) for each in PERCENTILES}
    return {"mean": float(np.mean(known)), **found}


def _per_second(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
