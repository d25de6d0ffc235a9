"""A single line of drafted tokens (Leviathan et al. 2023; Chen et al. 2023), with transformers' two ways to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from windfall.core.options import option
from windfall.core.types import Step
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Opening, Plan, TreeView

MAX_SCHEDULED = 32  # tokens that the heuristic schedule may grow to


@dataclass
class Chain(TreePolicy):
    """The drafter's likeliest token, its likeliest successor, and so on.

    `confidence` and `schedule` are transformers' assisted generation. The schedule starts anew with every text
    (transformers calls that heuristic_transient) and leaves the length as it is where nothing was drafted.
    """

    depth: int = option(5, "tokens to draft; with a schedule, to begin with", low=1)
    confidence: float = option(0.0, "stop after a token less probable than this; 0: never", low=0, high=1)
    schedule: str = option(
        "fixed", "heuristic: 2 tokens more after a cycle that accepted all, else 1 less", choices=("fixed", "heuristic")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._length = self.depth

    def plan(self) -> Plan:
        passes = self.depth if self.schedule == "fixed" else max(self.depth, MAX_SCHEDULED)
        line = Plan(passes=passes, width=1, k=1, rows=passes + 1, sizes=range(2, passes + 2))
        if self.confidence:
            return replace(line, watches=("logq",), decide=self.decide)
        if self.schedule == "fixed":
            return replace(line, sizes=())
        return replace(line, opening=self._opening, openings=range(1, passes + 1))

    def _opening(self, ctx: Context) -> Opening:
        return Opening(self._length, self._length + 1)

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        """Go on while the newest token is probable enough."""
        sure = float(view.logq(level)[0]) >= math.log(self.confidence)
        return Decision(sure and level < self._length, level + 1)

    def observe(self, step: Step) -> None:
        drafted = len(step.tree) - 1
        if self.schedule == "heuristic" and drafted:
            longer = min(self._length + 2, max(self.depth, MAX_SCHEDULED))
            self._length = longer if step.accepted == drafted else max(self._length - 1, 1)
