"""A finished text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from windfall.core.detokenizer import LateText
from windfall.core.logprobs import TokenLogprob
from windfall.core.stats import Stats
from windfall.core.step import Step


@dataclass(frozen=True)
class Generation:
    """A finished text, and how it was generated."""

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop", "length", "deadline", "cancelled" or "interrupted"
    steps: list[Step] = field(repr=False)
    stats: Stats

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return self.stats.prompt_tokens

    @property
    def seed(self) -> int | None:
        """The seed of the draws: with it the same prompt gives the same text. None: greedy, and none was given."""
        return self.stats.seed

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """The log-probabilities of `token_ids`; None if they were not wanted."""
        found = [step.logprobs for step in self.steps]
        return None if None in found else [each for own in found for each in own or ()]

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """The log-probabilities of the prompt's tokens, None for the first; None if they were not wanted."""
        found = self.steps[0].prompt_logprobs if self.steps else None
        return None if found is None else list(found)

    @classmethod
    def of(cls, steps: list[Step], times: list[float], prompt_tokens: int = 0, seed: int | None = None) -> Generation:
        """A Generation from its Steps and the seconds after the start at which each came."""
        last, first = (times[-1], times[0]) if times else (0.0, 0.0)
        return cls(
            text=text_of(steps, joins=False),
            token_ids=[token for step in steps for token in step.tokens],
            finish_reason=(steps and steps[-1].finish) or "interrupted",
            steps=steps,
            stats=Stats.of(steps, last, first, prompt_tokens, seed),
        )


def text_of(steps: list[Step], joins: bool = True) -> str:
    """The text of consecutive Steps. Where Steps decode it only when it is read, it is decoded at once.

    `joins`: the first of the Steps may then have the text of all. Without it, they must be the first of their sequence.
    """
    first: Any = steps[0] if steps else None
    late: LateText | None = getattr(first, "late_text", None)
    same = bool(steps) and late is getattr(steps[-1], "late_text", None)
    if late is None or not same:
        return "".join(step.text for step in steps)
    return late.between(first.number, first.number + len(steps)) if joins else late.whole(len(steps))
