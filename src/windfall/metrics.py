"""Folds over Steps: what a generation cost and what speculation gained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from windfall.records import Split, Step


@dataclass(frozen=True)
class Stats:
    """Figures of one generation. The prefill is counted in the times, not in the passes."""

    tokens: int
    cycles: int
    draft_passes: int
    rows: int  # verified, roots included
    seconds: float
    ttft: float  # start to first token
    prefill: float
    split: Split

    @classmethod
    def of(cls, steps: Sequence[Step], seconds: float, ttft: float, prefill: float) -> Stats:
        return cls(
            tokens=sum(len(step.tokens) for step in steps),
            cycles=len(steps),
            draft_passes=sum(step.draft_passes for step in steps),
            rows=sum(len(step.tree) for step in steps),
            seconds=seconds,
            ttft=ttft,
            prefill=prefill,
            split=Split(*(sum(part) for part in zip(*(step.seconds for step in steps), strict=True))),
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
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.seconds - self.ttft) / (self.tokens - 1) if self.tokens > 1 else 0.0

    def as_dict(self) -> dict[str, Any]:
        times = asdict(self)
        return {
            **{key: times[key] for key in ("tokens", "cycles")},
            "target_passes": self.target_passes,
            **{key: times[key] for key in ("draft_passes", "rows")},
            "tau": self.tau,
            "delta": self.delta,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "ttft": self.ttft,
            "tpot": self.tpot,
            "time": {"prefill": self.prefill, **self.split._asdict()},
        }
