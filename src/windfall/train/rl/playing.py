"""A pair of policies at play on a backend: what is decided, what it costs, what it brings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from windfall.policies.papers.ltd import Pair, View
from windfall.train.rl.backend import Backend, Outcome

REPLAYED = 0.03e-3  # seconds of a decision where nothing is measured


class Thinking:
    """The seconds that a cycle's decisions count: as configured, or as long as they take."""

    def __init__(self, seconds: float | None):
        self._each, self.seconds = seconds, 0.0

    def decide(self, choice: Callable[[View], Any], view: View) -> Any:
        """Make a decision on the clock."""
        started = time.perf_counter()
        chosen = choice(view)
        self.seconds += time.perf_counter() - started if self._each is None else self._each
        return chosen

    def start(self) -> None:
        self.seconds = 0.0


@dataclass(frozen=True)
class Reward:
    """What a cycle is worth; `unit` tokens per second count as 1."""

    kind: str = "throughput"
    unit: float = 1.0

    def of(self, outcome: Outcome) -> float:
        if self.kind == "throughput":
            return outcome.tokens / outcome.seconds / self.unit
        if self.kind == "length":
            return float(outcome.tokens)
        paid = outcome.seconds * self.unit
        return -paid if self.kind == "time" else outcome.tokens - paid

    def of_all(self, outcomes: list[Outcome]) -> float:
        """What checkpoints are chosen by: tokens per second, or the mean of what was asked for instead of it."""
        if self.kind in ("throughput", "profit"):
            return throughput(outcomes)
        return sum(map(self.of, outcomes)) / max(len(outcomes), 1)


def grow_to(backend: Backend, depth: int) -> None:
    while backend.passes < depth and backend.draft():
        pass


def grow_by(backend: Backend, pair: Pair, thinking: Thinking) -> None:
    """Draft as the pair's depth policy says."""
    while backend.draft():
        view = backend.view(newest=True)
        asked = pair.depth is not None and pair.rules.asks(view.depth)
        if thinking.decide(pair.stops, view) if asked else pair.stops(view):
            return


def nodes_by(backend: Backend, pair: Pair, thinking: Thinking) -> int:
    """How many nodes the pair's size policy wants verified."""
    view = backend.view(newest=False)
    return pair.nodes(view) if pair.size is None else int(thinking.decide(pair.nodes, view))


def play(backend: Backend, pair: Pair, seconds: float | None) -> list[Outcome]:
    """Every cycle of a backend that ends, with the pair's likeliest actions."""
    outcomes, thinking = list[Outcome](), Thinking(seconds)
    while backend.begin():
        thinking.start()
        grow_by(backend, pair, thinking)
        outcomes.append(backend.verify(nodes_by(backend, pair, thinking), thinking.seconds))
    return outcomes


def throughput(outcomes: list[Outcome]) -> float:
    """Tokens per second of all cycles together."""
    return sum(outcome.tokens for outcome in outcomes) / max(sum(outcome.seconds for outcome in outcomes), 1e-12)


def tau(outcomes: list[Outcome]) -> float:
    """Tokens of a cycle in the mean."""
    return sum(outcome.tokens for outcome in outcomes) / max(len(outcomes), 1)
