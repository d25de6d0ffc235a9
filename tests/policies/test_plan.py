"""Plans that contradict themselves are refused, and decisions see only what their plan watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from helpers.table import TableDrafter, draft, random_table
from windfall import TreePolicy
from windfall.engine.gpu.view import DeviceView
from windfall.policies.context import Context
from windfall.policies.plan import Bounds, Decision, LayerGate, NotWatched, Plan, TreeView
from windfall.policies.shape import Shape

SIZES: dict[str, Any] = {"passes": 3, "width": 2, "k": 2, "rows": 6}
READS: dict[str, Callable[[TreeView, int], object]] = {
    "summary": lambda view, level: view.summary(level),
    "score": lambda view, level: view.scores(level),
    "score of all": lambda view, level: view.all_scores(level),
    "expanded": lambda view, level: view.parent_score(level),
    "logq": lambda view, level: view.logq(level),
    "entropy": lambda view, level: view.entropies(level),
    "length": lambda view, level: view.length,
}


def go_on(level: int, view: TreeView, ctx: Context) -> Decision:
    return Decision(True, 6)


def a_shape(ctx: Context) -> Shape:
    return Shape([(0,)])


def some_bounds() -> Bounds:
    return Bounds(-1.0, 2, -1.0, 0.5, 0.2, 1, 2, 2, 2)


def some_prices(ctx: Context) -> tuple[float, float]:
    return 0.1, 0.1


class KeepAll:
    entropy = False
    key = "all"

    def weights(self) -> dict[str, Any]:
        return {}

    def keeps(self, weights: dict[str, Any], score: Any, depth: Any, entropy: Any) -> Any:
        return score == score


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "order": ({"order": "widest"}, "order must be one of"),
    "watches": ({"watches": ("speed",), "decide": go_on}, "watches may be"),
    "watches without a decision": ({"watches": ("score",)}, "need a decide function"),
    "asks without a decision": ({"asks": (1,)}, "need a decide function"),
    "a decision that watches nothing": ({"decide": go_on}, "must watch something"),
    "two rules": ({"shape": a_shape, "top": 4}, "only one of"),
    "a filter within bounds": ({"keep": KeepAll(), "bounds": some_bounds}, "only one of"),
    "top and scores": ({"top": 4, "watches": ("score",), "decide": go_on}, "with top or layer"),
    "layer and scores": (
        {"layer": LayerGate(0.1, 8, 2, 1), "watches": ("summary", "logq"), "decide": go_on},
        "with top or layer",
    ),
    "a filter of all nodes": ({"keep": KeepAll(), "order": "best"}, "keep needs order"),
    "a filter with decay": ({"keep": KeepAll(), "decay": 0.9}, "keep needs order"),
    "calibrated without prices": ({"calibrated": True}, "need prices"),
    "prices without calibration": ({"prices": lambda ctx: (0.1, 0.1)}, "need prices"),
    "calibrated with decay": (
        {"calibrated": True, "prices": lambda ctx: (0.1, 0.1), "decay": 0.9},
        "calibrated cannot",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_contradictory_plan_is_refused(name: str) -> None:
    given, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        Plan(**SIZES, **given)


@dataclass
class Reader(TreePolicy):
    """Its decision reads one thing and its plan watches others."""

    reads: str = "summary"
    watches: tuple[str, ...] = ()

    def plan(self) -> Plan:
        return Plan(**SIZES, watches=self.watches, decide=self.decide)

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        READS[self.reads](view, level)
        return Decision(True, 6)


def needed(reads: str) -> tuple[str, ...]:
    return ("score", "expanded") if reads == "expanded" else (reads.split()[0],)


@pytest.mark.parametrize("reads", READS)
def test_the_host_shows_what_the_plan_watches_and_nothing_else(reads: str) -> None:
    drafter = TableDrafter(random_table(9, 0))
    draft(Reader(reads, needed(reads)), drafter)
    other = "length" if reads == "summary" else "summary"
    with pytest.raises(NotWatched, match=needed(reads)[0] if reads != "expanded" else "score"):
        draft(Reader(reads, (other,)), drafter)


@pytest.mark.parametrize("reads", READS)
def test_the_device_shows_what_the_plan_watches_and_nothing_else(reads: str) -> None:
    arrays: dict[str, Any] = {name: np.zeros(16, np.float32) for name in ("score", "logq", "entropy")}
    arrays |= {"expanded": np.zeros(16, np.int64), "length": np.ones(1, np.int64), "summary": np.zeros((4, 6))}
    READS[reads](DeviceView(arrays, 2, 2, 1), 2)
    for name in needed(reads):
        with pytest.raises(NotWatched, match=name):
            READS[reads](DeviceView({k: v for k, v in arrays.items() if k != name}, 2, 2, 1), 2)
