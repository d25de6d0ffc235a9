"""Trees of likely nodes that grow on the device by bounds it has: those of `dynatree` and `fixed-tree`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from helpers.gpu import PRECISE, SAMPLINGS, drafter, paths, plan_of
from helpers.tiny import prompt, tiny
from helpers.watching import PAIRS, both
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.costs.acceptance import Calibrator
from windfall.engine.engine import Engine, Generation
from windfall.engine.gpu.cycle import MAX_CHILDREN_PER_NODE, Cycle, PassPredictor
from windfall.engine.gpu.drafters import ChildSampler
from windfall.engine.gpu.target import MAX_VERIFY_ROWS
from windfall.engine.gpu.transfer import PackedBuffer
from windfall.model.target import Target
from windfall.policies.context import Context
from windfall.policies.papers.dynatree import DynaTree
from windfall.policies.papers.fixed_tree import FixedTree
from windfall.policies.plan import Bounds

MIXED = {"history": "none", "base_depth": 2, "max_depth": 4, "sure": 0.5, "unsure": 0.2}  # all breadths happen
DYNATREES: dict[str, dict[str, Any]] = {
    "as it comes": {"history": "none"},
    "mixed": {**MIXED, "rho_deep": 0.1},
    "root": {**MIXED, "root_branching": True},
    "wide": {**MIXED, "narrow": 2, "middle": 4, "wide": 3, "tau": 0.04, "rho_stop": 0.03, "rho_deep": 0.06},
    "deep": {**MIXED, "root_branching": True, "base_depth": 4, "max_depth": 6, "rho_stop": 0.05, "unsure": 0.6},
}
FIXED_TREES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "shallow": {"depth": 0},
    "narrow": {"depth": 5, "breadth": 1, "tau": 0.01},
    "broad": {"depth": 3, "breadth": 4, "tau": 0.04},
    "whole": {"depth": 3, "breadth": 3, "tau": 0.0},  # so few levels that no floor is needed
}
SETTINGS = [("dynatree", own) for own in DYNATREES.values()] + [("fixed-tree", own) for own in FIXED_TREES.values()]


def pairs_of(turn: int, name: str) -> list[tuple[str, str]]:
    """Two pairs of models, or three for a policy whose trees must have been of several depths."""
    first = PAIRS[:2] if name == "dynatree" else [PAIRS[turn % 2]]
    return [*first, PAIRS[2 + turn % 2]]


def verify_the_same(wanted: Generation, found: Generation, deepest: int) -> list[Any]:
    """Cycle by cycle, but for the last ones; returns those of the device. What the host drafts and does not verify,
    the device leaves out."""
    said, compared = 0, []
    for one, other in zip(wanted.steps, found.steps, strict=False):
        if len(wanted.token_ids) - said <= deepest:  # the device does not know how much room is left
            break
        assert paths(one.tree) == paths(other.tree) == paths(other.drafted)
        assert one.draft_passes == other.draft_passes
        said += len(one.tokens)
        compared.append(other)
    assert len(compared) > 1
    return compared


@pytest.mark.parametrize(
    ("name", "settings", "early", "pairs"),
    [
        *((*each, True, pairs_of(turn, each[0])) for turn, each in enumerate(SETTINGS)),
        ("dynatree", DYNATREES["root"], False, PAIRS[:3]),
        ("fixed-tree", FIXED_TREES["broad"], False, PAIRS[:3]),
    ],
)
def test_the_device_verifies_the_same(
    name: str, settings: dict[str, Any], early: bool, pairs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not, one pair of models after the other, passes are launched before the plan is asked."""
    passes: set[int] = set()
    breadths: set[int] = set()
    for turn, (family, kind) in enumerate(pairs):
        at_once = early == (turn % 2 == 0)
        monkeypatch.setattr(PassPredictor, "likely", lambda self, level, at_once=at_once: at_once)
        own = registry.policy(name, **settings)
        plan = plan_of(own)
        assert plan is not None
        for step in verify_the_same(*both(family, kind, own), plan.passes):
            passes.add(step.draft_passes)
            breadths.update(count for node, count in Counter(step.tree.parents.tolist()).items() if node > 0)
    if isinstance(own, DynaTree):
        assert len(passes) > 2 and breadths >= {own.narrow, own.wide}
        assert own.middle in breadths or own.unsure > own.sure
    else:
        assert isinstance(own, FixedTree)
        assert breadths == ({own.breadth} if own.depth else set())
        assert len(passes) > 2 or min(own.depth, own.tau) == 0


@pytest.mark.parametrize(("sampling", "coupled"), [("warm", True), ("warm", False), ("nucleus", True)])
@pytest.mark.parametrize(("name", "settings"), [("dynatree", DYNATREES["root"]), ("fixed-tree", FIXED_TREES["broad"])])
def test_sampling(
    name: str, settings: dict[str, Any], sampling: str, coupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Calibrator, "_fit_kappa", lambda self, *given: None)  # the device hears of it a cycle later
    own = registry.policy(name, **settings)
    verify_the_same(*both("llama", "lm", own, coupled, **SAMPLINGS[sampling]), deepest=4)


def test_the_device_hears_of_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every change, and of nothing else."""
    heard: list[Bounds] = []
    meant: list[Bounds] = []
    begin, send_terms = Cycle._first_logits, Cycle.send_terms

    def opened(self: Cycle, sampler: ChildSampler) -> Any:
        assert self.bounds is not None
        heard.append(Bounds(*self.bounds.tolist()))
        return begin(self, sampler)

    def sending(self: Cycle, ctx: Context) -> None:
        assert self.plan.bounds is not None
        meant.append(self.plan.bounds())
        send_terms(self, ctx)

    sent, send = [], PackedBuffer.send
    monkeypatch.setattr(Cycle, "_first_logits", opened)
    monkeypatch.setattr(Cycle, "send_terms", sending)
    monkeypatch.setattr(PackedBuffer, "send", lambda self: (sent.append("bounds" in self.host), send(self)))
    for history in ("paper", "none"):
        meant.clear(), heard.clear(), sent.clear()
        both("llama", "lm", registry.policy("dynatree", history=history))
        assert len(meant) == len(heard) > 3
        assert all(one == pytest.approx(other) for one, other in zip(meant, heard, strict=True))
        assert sum(sent) == sum(one != other for one, other in zip(meant, [None, *meant], strict=False))
        assert (len(set(meant)) > 3) == (history == "paper")


def test_texts_of_one_engine_share_a_history() -> None:
    """Where the policy says so: the second text begins with what the first one taught."""
    own = registry.policy("dynatree", history="release")
    assert isinstance(own, DynaTree)
    made = Engine(Target(tiny(dtype=PRECISE)), drafter("lm"), own, gpu_options=GpuOptions(True))
    for seed in range(6):
        made.generate(prompt(seed=seed), max_new_tokens=6, eos=())
    assert made.fallback == "" and own.steering.depth < own.base_depth and len(own.steering.recent) == 6


def test_what_has_a_plan() -> None:
    wide = {"depth": 4, "nodes": MAX_VERIFY_ROWS - 1}
    for name, settings, rows, width in (
        ("dynatree", {}, 161, 10),
        ("dynatree", {"root_branching": True}, 190, 10),
        ("dynatree", {"nodes": 160}, 161, 10),
        ("fixed-tree", {}, 191, 10),
        ("fixed-tree", {"nodes": 190}, 191, 10),
        ("fixed-tree", {"tau": 0.0, "depth": 4}, 122, 27),
    ):
        plan = plan_of(registry.policy(name, **settings))
        assert plan is not None and (plan.rows, plan.width) == (rows, width)
    for name, settings in (
        ("dynatree", {"nodes": 159}),  # the largest tree could be cut off
        ("dynatree", {"tau": 0.0, "rho_stop": 0.0}),
        ("fixed-tree", {"nodes": 189}),
        ("fixed-tree", {"tau": 0.0}),
        ("fixed-tree", {"breadth": MAX_CHILDREN_PER_NODE + 1, "depth": 1}),
        ("fixed-tree", {**wide, "breadth": 2, "depth": 7, "tau": 0.03}),  # 33 nodes in a pass
    ):
        assert plan_of(registry.policy(name, **settings)) is None, settings
    assert plan_of(registry.policy("fixed-tree", **{**wide, "breadth": 2, "depth": 6, "tau": 0.03})) is not None
