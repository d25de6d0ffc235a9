"""Rollouts of a pair of LTD policies: the interface of their backends, decision times, rewards, throughput."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from windfall.core.errors import InputError
from windfall.policies.papers.ltd import Pair, View

T = TypeVar("T")
SPLITS = ("train", "validation", "test")


class Outcome(NamedTuple):
    """The result and the cost of a cycle."""

    tokens: int  # committed, including the target's own token
    seconds: float
    passes: int
    nodes: int  # drafted and verified


class Backend(Protocol):
    """Runs beam cycles one decision at a time: `begin`, then `draft` at least once, then `verify`."""

    passes: int  # of this cycle so far

    def begin(self) -> bool:
        """Begin a cycle, where the last one ended or in the next text; False: all texts are finished."""

    def draft(self) -> bool:
        """Run one more pass of the beam; False: it added no candidates, and none will follow."""

    def view(self, newest: bool) -> View:
        """The candidates of the last pass that added some, or of all passes."""

    def verify(self, nodes: int, decision_seconds: float) -> Outcome:
        """Verify the best `nodes` candidates; `decision_seconds` is the time of the policies' decisions."""

    def close(self) -> None:
        """Release the backend; no more cycles follow."""


class Source(Protocol):
    """Makes backends over the training, validation and test texts."""

    environments: int  # that can step together
    about: dict[str, Any]  # recorded with the trained policies
    decision_seconds: float | None  # of a decision; None: measured

    def training_backend(self, seed: int) -> Backend:
        """The training texts, endlessly and in random order."""

    def evaluation_backend(self, split: str) -> Backend:
        """The texts of a split, each once."""


def split_texts(texts: list[T]) -> dict[str, list[T]]:
    """Of every five texts, the fourth is for validation and the fifth for testing."""
    if len(texts) < 3:
        raise InputError(f"{len(texts)} texts are too few for training, validation and testing; give more")
    parts: dict[str, list[T]] = {split: [] for split in SPLITS}
    for place, text in enumerate(texts):
        parts[SPLITS[max(place % 5 - 2, 0)] if len(texts) >= 5 else SPLITS[place % 3]].append(text)
    return parts


class DecisionTimer:
    """The time of a cycle's decisions: a configured time for each, or the measured one."""

    def __init__(self, seconds: float | None):
        self._each, self.seconds = seconds, 0.0

    def decide(self, choice: Callable[[View], Any], view: View) -> Any:
        """Make a decision and add its time."""
        started = time.perf_counter()
        chosen = choice(view)
        self.seconds += time.perf_counter() - started if self._each is None else self._each
        return chosen

    def reset(self) -> None:
        self.seconds = 0.0


@dataclass(frozen=True)
class Reward:
    """The reward of a cycle; `unit` tokens per second are a reward of 1."""

    kind: str = "throughput"
    unit: float = 1.0

    def of(self, outcome: Outcome) -> float:
        if self.kind == "throughput":
            return outcome.tokens / outcome.seconds / self.unit
        if self.kind == "length":
            return float(outcome.tokens)
        cost = outcome.seconds * self.unit
        return -cost if self.kind == "time" else outcome.tokens - cost

    def score(self, outcomes: list[Outcome]) -> float:
        """What checkpoints are selected by: tokens per second, or the mean reward of the kinds `length` and `time`."""
        if self.kind in ("throughput", "profit"):
            return throughput(outcomes)
        return sum(map(self.of, outcomes)) / max(len(outcomes), 1)


def draft_to(backend: Backend, depth: int) -> None:
    """Draft a fixed number of passes."""
    while backend.passes < depth and backend.draft():
        pass


def draft_by(backend: Backend, pair: Pair, timer: DecisionTimer) -> None:
    """Draft until the pair's depth policy stops."""
    while backend.draft():
        view = backend.view(newest=True)
        asked = pair.depth is not None and pair.rules.asks(view.depth)
        if timer.decide(pair.stops, view) if asked else pair.stops(view):
            return


def nodes_by(backend: Backend, pair: Pair, timer: DecisionTimer) -> int:
    """The number of nodes that the pair's size policy chooses to verify."""
    view = backend.view(newest=False)
    return pair.nodes(view) if pair.size is None else int(timer.decide(pair.nodes, view))


def rollout(backend: Backend, pair: Pair, decision_seconds: float | None) -> list[Outcome]:
    """All cycles of a finite backend, with the pair's likeliest actions."""
    outcomes, timer = list[Outcome](), DecisionTimer(decision_seconds)
    while backend.begin():
        timer.reset()
        draft_by(backend, pair, timer)
        outcomes.append(backend.verify(nodes_by(backend, pair, timer), timer.seconds))
    return outcomes


def throughput(outcomes: list[Outcome]) -> float:
    """Tokens per second over all cycles."""
    return sum(outcome.tokens for outcome in outcomes) / max(sum(outcome.seconds for outcome in outcomes), 1e-12)


def tau(outcomes: list[Outcome]) -> float:
    """Mean tokens per cycle."""
    return sum(outcome.tokens for outcome in outcomes) / max(len(outcomes), 1)
