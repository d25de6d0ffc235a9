"""Plans that watch the tree: the same decisions, trees and texts on fixed buffers as on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.gpu import (
    LENGTH,
    LONG,
    ON_DEVICE,
    PRECISE,
    SAMPLINGS,
    Replayed,
    drafter,
    paths,
    plain_text,
    plan_of,
    same_trees,
)
from helpers.ltd import random_pair
from helpers.tiny import prompt, tiny
from helpers.watching import MISSING, NETWORKS, PAIRS, both, policy
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.costs.acceptance import Calibrator
from windfall.engine.engine import Engine
from windfall.engine.gpu.cycle import Cycle, PassPredictor, plan_key
from windfall.engine.gpu.drafters import ChildSampler
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.target import MAX_VERIFY_ROWS
from windfall.model.target import Target
from windfall.policies.papers import ltd
from windfall.policies.papers.ltd import LTD, Pair, View

WATCHING = ["svip", "disco", "specdecpp", "c2t", "c2t-entropy", *NETWORKS]
SAMPLED = ["svip", "disco", "specdecpp", "c2t", "c2t-entropy", "ltd", "ltd-release"]


@pytest.mark.parametrize("name", WATCHING)
def test_plans_decide_as_their_policies(name: str, tmp_path: Path) -> None:
    depths: set[int] = set()
    another = (PAIRS[2], PAIRS[0], PAIRS[3])[WATCHING.index(name) % 3]
    for family, kind in (PAIRS[1], another) if name not in MISSING else PAIRS[:1]:
        wanted, found = both(family, kind, policy(name, tmp_path))
        same_trees(wanted, found, deepest=6)
        depths |= {step.draft_passes for step in found.steps}
    assert len(depths) > 1 or name in MISSING, "decisions that are all the same show little"


@pytest.mark.parametrize(
    ("name", "sampling", "coupled"),
    [
        *((name, "warm", True) for name in SAMPLED),
        *((name, "warm", False) for name in ("svip", "specdecpp", "c2t", "ltd")),
        *((name, "nucleus", True) for name in ("disco", "c2t-entropy", "svip", "ltd-release")),
    ],
)
def test_sampling(name: str, sampling: str, coupled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kappa is held constant: the device gets a new value one cycle later than the host."""
    monkeypatch.setattr(Calibrator, "_fit_kappa", lambda self, *given: None)
    wanted, found = both("llama", "lm", policy(name, tmp_path), coupled, **SAMPLINGS[sampling])
    same_trees(wanted, found, deepest=6)


@pytest.mark.parametrize(("seconds", "wanted"), [(0.1, False), (1e-3, False), (6e-5, True)])
def test_a_pass_is_launched_early_if_waiting_costs_more(seconds: float, wanted: bool) -> None:
    """Drafting went on in two of three cycles: enough to launch a short pass early, not a long one."""
    predictor = PassPredictor()
    predictor.set_pass_seconds(seconds)
    for cycle in range(300):
        predictor.observe(3, cycle % 3 > 0)
    assert predictor.likely(3) == wanted and not predictor.likely(4)
    for _ in range(100):
        predictor.observe(3, True)
    assert predictor.likely(3)


@pytest.mark.parametrize("name", ["ddd", "gt", "svip", "c2t", "ltd-padded"])
def test_passes_that_did_not_wait_leave_no_trace(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launching a pass before the plan decides changes no tree."""
    launched = {True: 0, False: 0}
    expand = Cycle.next_pass
    for early in launched:

        def counted(self: Cycle, sampler: ChildSampler, early: bool = early) -> None:
            launched[early] += 1
            expand(self, sampler)

        monkeypatch.setattr(Cycle, "next_pass", counted)
        monkeypatch.setattr(PassPredictor, "likely", lambda self, level, early=early: early)
        own = registry.policy(name, **ON_DEVICE[name]) if name in ON_DEVICE else policy(name, tmp_path)
        wanted, found = both(*(("qwen3", "eagle") if name == "ltd-padded" else ("llama", "eagle3")), own)
        same_trees(wanted, found, deepest=6)
    assert launched[True] > launched[False]


@pytest.mark.parametrize("name", [*WATCHING, "ddd", "salf"])
def test_no_cycle_waits_for_a_capture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures fit into the buffers, also if the plan decides after its last pass or the one before."""
    monkeypatch.setattr(GraphCache, "_capture", lambda self, key, work: self.graphs.update({key: Replayed(work)}))
    short = {"ddd": {"depth": 5, "k": 4, "nodes": 12, "checks": "4,5"}, "salf": {"k": 4, "width": 4, "cap": 3}}
    own = registry.policy(name, **short[name]) if name in short else policy(name, tmp_path)
    made = Engine(
        Target(tiny("llama", dtype=PRECISE)), drafter("eagle3"), own, gpu_options=GpuOptions(True, exact=False)
    )
    assert made.gpu_runner is not None
    made.gpu_runner.gpu_target.graph_cache.enabled = True
    found = made.generate(prompt(), max_new_tokens=LENGTH, eos=())
    assert made.fallback == "" and found.token_ids == plain_text("llama")
    assert not any(step.recorded for step in found.steps)


@pytest.mark.parametrize(("early", "pairs"), [(True, PAIRS[:2]), (False, PAIRS[1:])], ids=["early", "late"])
@pytest.mark.parametrize("settings", [{}, {"th": 0.2, "nodes": 12}, {"th": 0.0, "nodes": 9, "width": 3, "cap": 5}])
def test_salf_verifies_the_same(
    settings: dict[str, Any], early: bool, pairs: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes and verified nodes are the same; the device keeps only nodes that can still be verified."""
    monkeypatch.setattr(PassPredictor, "likely", lambda self, level: early)
    passes: set[int] = set()
    for family, kind in pairs:
        wanted, found = both(family, kind, registry.policy("salf", **{"k": 4, "width": 4, "cap": 6, **settings}))
        said = compared = 0
        for one, other in zip(wanted.steps, found.steps, strict=False):
            if len(wanted.token_ids) - said <= 6:  # the device does not know how much room is left
                break
            assert paths(one.tree) == paths(other.tree) and one.draft_passes == other.draft_passes
            said, compared = said + len(one.tokens), compared + 1
            passes.add(one.draft_passes)
        assert compared > 3
    assert len(passes) > 1


@pytest.mark.parametrize("name", ["ltd", "ltd-padded", "ltd-release", "ltd-entropies"])
def test_ltd_sees_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs of the networks are the same: ordered scores, the length of the text, entropies."""
    views: list[View] = []
    for asked in ("stops", "nodes"):

        def noted(self: Pair, view: View, known: Any = getattr(Pair, asked)) -> Any:
            views.append(view._replace(scores=view.scores.copy(), entropy=view.entropy.copy()))
            return known(self, view)

        monkeypatch.setattr(Pair, asked, noted)
    for family, kind in (("llama", "eagle3-pruned"), ("gpt-neox", "itself")):
        own, views[:] = policy(name, tmp_path), []
        assert isinstance(own, LTD)
        target, seen = Target(tiny(family, dtype=PRECISE)), []
        for graphs in (False, True):
            made = Engine(target, drafter(kind), own, gpu_options=GpuOptions(graphs, exact=False))
            made.generate(prompt(), max_new_tokens=LONG, eos=())
            rules = own.pair.rules
            seen.append([view for view in views if view.length < LONG and rules.asks(view.depth)])
            views.clear()
        assert len(seen[0]) > 5 and len({view.length for view in seen[0]}) > 2
        for one, other in zip(*seen, strict=False):
            assert one[1:3] == other[1:3]
            scores = [np.sort(view.scores) if rules.layout == "ranked" else view.scores for view in (one, other)]
            assert scores[0] == pytest.approx(scores[1][-len(scores[0]) :], abs=1e-5)
            assert one.entropy == pytest.approx(other.entropy, abs=1e-5)


def test_the_shipped_policies_have_plans() -> None:
    for name in set(registry.policies()) - {"bandit", "auto", "tetris", "batch-gt", "smart", "survival"}:
        assert plan_of(registry.policy(name)) is not None
    keys = {plan_key(plan) for beta in (0.1, 0.2) if (plan := plan_of(registry.policy("c2t", beta=beta)))}
    assert len(keys) == 2, "captured graphs contain the threshold"
    plan = plan_of(registry.policy("ltd"))
    assert plan is not None and plan.rows <= MAX_VERIFY_ROWS
    assert plan_of(registry.policy("beam", nodes=MAX_VERIFY_ROWS + 1)) is None


def test_a_large_tree_is_verified_on_fixed_buffers(tmp_path: Path) -> None:
    """LTD's sizes go to 240 nodes."""
    ltd.save(random_pair(5, k=10, forced=4, max_depth=5), tmp_path, {})
    own = registry.policy("ltd", path=str(tmp_path))
    wanted, found = both("llama", "lm", own)
    same_trees(wanted, found, deepest=5)
    assert max(len(step.tree) for step in found.steps) > 128


def test_policies_can_be_made_to_decide_on_the_host(tmp_path: Path) -> None:
    for name in ("beam", "svip", "ltd"):
        own = registry.policy(name, **ON_DEVICE[name]) if name in ON_DEVICE else policy(name, tmp_path)
        target = Target(tiny(dtype=PRECISE))
        made = [
            Engine(target, drafter("lm"), own, gpu_options=GpuOptions(True, plans=plans)) for plans in (True, False)
        ]
        texts = [each.generate(prompt(), max_new_tokens=6, eos=()).token_ids for each in made]
        assert texts[0] == texts[1]
        assert [each.fallback for each in made] == ["", "its policy decides on the host"]


def test_steps_have_the_time_of_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassPredictor, "likely", lambda self, level: False)
    _, found = both("llama", "lm", policy("ltd", tmp_path))
    assert all(step.seconds.policy > 0 and step.seconds.draft > 0 for step in found.steps)
