"""What a training came to: predicted or measured throughput on texts that it never saw, beside fixed beams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from windfall.core.errors import InputError
from windfall.policies.papers import ltd
from windfall.policies.papers.ltd import Pair
from windfall.train.rl.backend import Outcome
from windfall.train.rl.learning import DEFAULT, STAGES, Learner
from windfall.train.rl.playing import tau, throughput


@dataclass(frozen=True)
class Standing:
    """One way to decide, on the test texts."""

    name: str
    throughput: float  # tokens per second
    tau: float
    passes: float  # in the mean
    nodes: float

    @classmethod
    def of(cls, name: str, outcomes: list[Outcome]) -> Standing:
        count = max(len(outcomes), 1)
        passes, nodes = (sum(each[place] for each in outcomes) / count for place in (2, 3))
        return cls(name, throughput(outcomes), tau(outcomes), passes, nodes)


def fixed(learner: Learner, depth: int, nodes: int) -> Pair:
    """A beam that decides nothing."""
    return Pair(replace(learner.rules, fixed_depth=depth, fixed_size=nodes))


def search(learner: Learner, part: str = "train") -> tuple[int, int]:
    """The best fixed depth and size on these texts."""
    rules = learner.rules
    grid = [(depth, nodes) for depth in range(1, rules.max_depth + 1) for nodes in rules.sizes]
    return max(grid, key=lambda each: throughput(learner.play(fixed(learner, *each), part)))


def played(learner: Learner, part: str = "test", searched: bool = True) -> dict[str, list[Outcome]]:
    """The cycles of fixed beams, of every stage's best and of the final policies, by name."""
    pairs: dict[str, Pair] = {
        "beam 6, 60 rows (default)": Pair(replace(learner.rules, **DEFAULT)),
        "beam 8, 60 rows (EAGLE-3)": fixed(learner, 8, 59),
    }
    if searched:
        depth, nodes = search(learner)
        pairs[f"beam {depth}, {nodes + 1} rows (grid search)"] = fixed(learner, depth, nodes)
    for name in ["iter0", *(stage.name for stage in learner.stages)]:
        try:
            pairs[name] = ltd.load(learner.folder / STAGES / name)
        except InputError:
            continue
    pairs["ltd"] = ltd.load(learner.folder)
    return {name: learner.play(pair, part) for name, pair in pairs.items()}


def table(found: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    return [vars(Standing.of(name, outcomes)) for name, outcomes in found.items()]
