"""Batches that share a budget: every text is plain decoding's, and the budget decides for all requests together."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

import pytest
import torch

from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import SamplingParams, Step
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import ASSUMED, Costs
from windfall.costs.online import OnlineCosts
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.engine.host_runner import HostRunner
from windfall.engine.sequence import Sequence
from windfall.engine.shared_budget import SharedBudgets
from windfall.model.decoder import tree_attention
from windfall.model.target import Target
from windfall.policies.budget import Budget, Load, OwnSizes, Sizes

SHARING = ["auto", "tetris", "batch-gt", "smart", "survival", "beam", "chain", "static", "sequoia", "dynatree"]
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.9, "seed": 4, "top_p": 0.95}}
NEW = 14  # tokens of a text
FLAT = Costs.simple(0.02, (1, 512), (1.0, 1.2))
STEEP = Costs.simple(0.05, (1, 64), (1.0, 20.0))


@cache
def target() -> Target:
    return Target(tiny())


def drafter() -> LMDrafter:
    return LMDrafter(tiny(seed=0).half().float())  # nearly the target, so that much is accepted


def prompts(count: int) -> list[list[int]]:
    return [prompt(3 + 5 * i % 17, seed=i) for i in range(count)]


def engine(policy: str, costs: Costs = FLAT, **settings: Any) -> Engine:
    made = Engine(target(), drafter(), registry.policy(policy, **settings))
    made.costs = costs
    return made


@cache
def plain(count: int, sampling: str) -> list[list[int]]:
    made = engine("none")
    return [made.generate(p, max_new_tokens=NEW, **SAMPLINGS[sampling]).token_ids for p in prompts(count)]


@pytest.mark.parametrize(("sampling", "count"), [("greedy", 1), ("greedy", 8), ("sampled", 3)])
@pytest.mark.parametrize("policy", SHARING)
def test_texts_of_a_batch_are_those_of_plain_decoding(policy: str, sampling: str, count: int) -> None:
    made = engine(policy)
    found = made.generate_batch(prompts(count), max_new_tokens=NEW, **SAMPLINGS[sampling])
    assert [text.token_ids for text in found] == plain(count, sampling)
    assert max(text.stats.tau for text in found) > 1.2


def test_fixed_plans_keep_their_own_sizes_in_a_batch() -> None:
    """The shared choice gives each request the rows that it chooses alone."""
    made = engine("beam", depth=3, k=4, nodes=9)
    together = made.generate_batch(prompts(3), max_new_tokens=NEW)
    alone = [made.generate(p, max_new_tokens=NEW) for p in prompts(3)]
    for one, other in zip(together, alone, strict=True):
        assert [step.tree.tokens.tolist() for step in one.steps] == [step.tree.tokens.tolist() for step in other.steps]


def test_which_policies_share() -> None:
    for name in registry.policies():
        budget, plan = registry.policy(name).budget(), registry.policy(name).plan()
        if name in ("auto", "tetris", "batch-gt", "smart", "survival"):
            assert isinstance(budget, Budget) and not isinstance(budget, OwnSizes)
        else:
            fixed = plan is not None and plan.decide is None and plan.opening is None
            assert isinstance(budget, OwnSizes) is fixed, name


def decode(policies: list[Any], costs: Costs = FLAT) -> tuple[list[list[int]], list[dict[int, Step]]]:
    """Decode a batch in which every request has its own policy; the texts and the steps."""
    made, params = engine("none"), SamplingParams(max_new_tokens=NEW)
    calibrators: defaultdict[str, Calibrator] = defaultdict(Calibrator)
    sequences = [
        Sequence(p, params, policy, made.target, True, calibrators)
        for p, policy in zip(prompts(len(policies)), policies, strict=True)
    ]
    costs_of_batch = OnlineCosts(costs, learns=False)
    with tree_attention(made.target.model):
        loop = HostRunner(made.target, made.drafter, torch.device("cpu"), costs_of_batch)
        steps = list(loop.run(sequences))
    return [s.tokens[len(p) :] for s, p in zip(sequences, prompts(len(policies)), strict=True)], steps


def test_requests_with_different_policies_share_only_the_verify_pass() -> None:
    names = ["beam", "auto", "opt-tree", "auto", "tetris", "beam", "none", "tetris"]
    texts, _ = decode([registry.policy(name) for name in names])
    assert texts == plain(len(names), "greedy")


class Counting(Budget):
    """Chains of two tokens; notes every load."""

    def __init__(self) -> None:
        self.loads: list[Load] = []
        self.outcomes = 0

    def sizes(self, load: Load) -> Sizes:
        self.loads.append(load)
        return Sizes(2, 1, 1, load.requests + 2)

    def observe(self, outcome: Any) -> None:
        self.outcomes += 1
        assert len(outcome.owner) <= 2 * outcome.requests and outcome.verified.sum() <= 2
        assert not (outcome.accepted & ~outcome.verified).any()
        below = outcome.parents >= 0
        assert (outcome.owner[below] == outcome.owner[outcome.parents[below]]).all()
        assert (outcome.key[below] <= outcome.key[outcome.parents[below]]).all()


def test_one_budget_decides_once_a_round_for_all_equal_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Counting()
    monkeypatch.setattr("windfall.policies.beam.Beam.budget", lambda self: budget, raising=False)
    texts, steps = decode([registry.policy("beam") for _ in range(4)])
    assert texts == plain(4, "greedy")
    shared = [cycle for cycle in steps if len(cycle) > 1]
    assert len(budget.loads) == budget.outcomes == len(shared), "a last request decides for itself"
    for load, cycle in zip(budget.loads, shared, strict=True):
        assert load.requests == len(cycle)
        assert sum(len(step.tree) for step in cycle.values()) <= len(cycle) + 2


def test_policies_are_equal_by_their_settings() -> None:
    made = engine("none")
    calibrators = {"greedy": Calibrator()}
    live = [
        Sequence(prompt(), SamplingParams(), registry.policy("beam", nodes=nodes), made.target, True, calibrators)
        for nodes in (8, 9, 8)
    ]
    contexts = [sequence.context(ASSUMED) for sequence in live]
    begun = SharedBudgets(made.online_costs).begin(live, contexts)
    assert [grower is sequence.policy for grower, sequence in zip(begun.growers, live, strict=True)] == [
        False,
        True,
        False,
    ]


def test_auto_decodes_plainly_where_rows_are_dear() -> None:
    """With a drafter that is never right and dear rows, nearly all rounds have one row per request."""
    made = Engine(target(), LMDrafter(tiny(seed=9)), registry.policy("auto"))
    made.costs = STEEP
    found = made.generate_batch(prompts(4), max_new_tokens=60)
    rows = [len(step.tree) for text in found for step in text.steps[10:]]
    assert sum(rows) < 1.25 * len(rows)
