"""Statistics of a generation, computed from its steps; intervals and comparisons of figures and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from windfall.core.step import Counts, Split, Step


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """The first place where two lists differ, possibly the end of the shorter one; None if they are equal."""
    pairs = zip(one, other, strict=False)
    end = None if len(one) == len(other) else min(len(one), len(other))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), end)


class Estimate(NamedTuple):
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float


class Totals(NamedTuple):
    """Sums over the steps of one or more texts."""

    cycles: int
    tokens: int
    rows: int  # verified nodes, roots included
    accepted: int  # drafted tokens that are part of the text
    drafted: int
    draft_passes: int

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Totals:
        return cls.of_counts([step.counts for step in steps])

    @classmethod
    def of_counts(cls, counts: Sequence[Counts]) -> Totals:
        """The sums over steps with these counts, without a loop: a text has hundreds of them."""
        tokens, rows, accepted, drafted, passes = zip(*(counts or [(0, 0, 0, 0, 0)]), strict=True)
        return cls(len(counts), sum(tokens), sum(rows), sum(map(min, tokens, accepted)), sum(drafted), sum(passes))


@dataclass(frozen=True)
class Stats:
    """Statistics of one generation. The prefill counts in the times, not in the passes.

    Texts that are decoded in one batch share prefill and cycles: each has the seconds of the whole batch.
    """

    tokens: int  # generated
    cycles: int  # each has one pass of the target
    draft_passes: int
    rows: int  # verified nodes, roots included
    seconds: float  # from the start to the last token
    ttft: float  # seconds from the start to the first token
    prefill: float  # seconds of the prefill
    split: Split  # seconds by part of the cycles
    prompt_tokens: int = 0
    seed: int | None = None  # of the draws; None: greedy, and none was given

    @classmethod
    def of(
        cls,
        steps: Sequence[Step],
        seconds: float,
        ttft: float,
        prompt_tokens: int = 0,
        seed: int | None = None,
    ) -> Stats:
        totals = Totals.of(steps)
        return cls(
            tokens=totals.tokens,
            cycles=totals.cycles,
            draft_passes=totals.draft_passes,
            rows=totals.rows,
            seconds=seconds,
            ttft=ttft,
            prefill=steps[0].prefill_seconds if steps else 0.0,
            split=Split(*(sum(part) for part in zip(*(step.seconds for step in steps), strict=True))),
            prompt_tokens=prompt_tokens,
            seed=seed,
        )

    @property
    def target_passes(self) -> int:
        return self.cycles

    @property
    def tau(self) -> float:
        """Tokens per target pass, the target's own token included."""
        return self.tokens / self.cycles if self.cycles else 0.0

    @property
    def delta(self) -> float:
        """Draft passes per target pass."""
        return self.draft_passes / self.cycles if self.cycles else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Speed of the prefill."""
        return self.prompt_tokens / self.prefill if self.prefill else 0.0

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.seconds - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0

    def as_dict(self) -> dict[str, Any]:
        times = asdict(self)
        return {
            **{key: times[key] for key in ("prompt_tokens", "tokens", "cycles")},
            "target_passes": self.target_passes,
            **{key: times[key] for key in ("draft_passes", "rows")},
            "tau": self.tau,
            "delta": self.delta,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "time": {"prefill": self.prefill, **self.split._asdict()},
            "seed": self.seed,
        }
