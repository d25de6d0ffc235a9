"""Budgets in simulated batches: the modelled throughput of `auto` against its rivals, and what it spends on probes."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.batches import CURVES, METHODS, MIXES, Batch, speeds
from windfall import registry
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import Costs
from windfall.policies.auto_budget import EXPLORATION_SHARE, PREPARATION_SHARE, AutoBudget
from windfall.policies.budget import Load, Outcome, Preparation, Sizes

ROUNDS = {1: 320, 8: 160, 64: 100}  # by the number of requests; benchmarks/batches.py has more
CLOSE = 0.98  # of the best rival's speed


@pytest.mark.parametrize("requests", ROUNDS)
@pytest.mark.parametrize("curve", CURVES)
def test_auto_is_as_fast_as_the_best_rival_with_mixed_texts(curve: str, requests: int) -> None:
    found = speeds(curve, "mixed", requests, ROUNDS[requests])
    assert found["auto"] >= CLOSE * max(found.values()), found


@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix != "mixed"])
@pytest.mark.parametrize("requests", [8])
@pytest.mark.parametrize("curve", CURVES)
def test_auto_is_as_fast_as_fixed_sizes_with_texts_of_one_kind(curve: str, requests: int, mix: str) -> None:
    found = speeds(curve, mix, requests, 200, ("plain", "chain of 4", "tree of 8", "survival", "auto"))
    assert found["auto"] >= CLOSE * max(found.values()), found


def test_a_request_that_is_always_rejected_gets_no_more_rows() -> None:
    """The drafter is as confident in the wrong texts as in the easy ones."""
    batch, budget = Batch(CURVES["8B"], 16, ("easy", "wrong")), AutoBudget(96)
    rows = np.zeros((2, 2))  # early or late, easy or wrong
    for number in range(40):
        tree = batch.round(budget).tree
        late = number >= 20
        for kind in (0, 1):
            rows[int(late), kind] += tree.verified[tree.owner % 2 == kind].sum()
    assert rows[1, 1] <= 0.5 * rows[1, 0]


def test_probes_take_a_small_share_of_the_time() -> None:
    batch, budget = Batch(CURVES["8B"], 128, MIXES["easy"]), AutoBudget(96)
    log = [batch.round(budget) for _ in range(300)][20:]
    plain = min(each.seconds for each in log)
    probes = [each for each in log if each.sizes.passes]
    assert 2 < len(probes) < 30
    lost = sum(each.seconds - plain * each.tokens / 128 for each in probes)
    assert lost < 1.2 * EXPLORATION_SHARE * sum(each.seconds for each in log)


def test_there_are_probes_even_if_no_recent_node_was_likely() -> None:
    budget, calibrator = AutoBudget(96), Calibrator()
    budget.sizes(load(8, calibrator))
    hopeless = np.full(16, -9.0, np.float32)
    numbers = np.arange(16)
    for _ in range(8):
        budget.observe(
            Outcome(
                sizes=Sizes(1, 1, 2, 24, calibrated=True),
                requests=8,
                owner=numbers // 2,
                parents=np.full(16, -1),
                depth=np.ones(16, np.int64),
                rank=numbers % 2,
                logq=hopeless,
                key=hopeless,
                expanded=np.zeros(16, bool),
                verified=np.ones(16, bool),
                accepted=np.zeros(16, bool),
                seconds=0.0,
            )
        )
    made = [budget.sizes(load(8, calibrator)) for _ in range(2000)]
    assert 5 < sum(sizes.passes > 0 for sizes in made) < 200


def test_drafting_comes_back_when_the_load_falls() -> None:
    """128 requests are decoded plainly, the 8 that are left are not."""
    budget, calibrator = AutoBudget(96), Calibrator()
    busy = Batch(CURVES["8B"], 128, MIXES["easy"], calibrator=calibrator)
    for _ in range(30):
        busy.round(budget)
    assert budget.sizes(load(128, calibrator)).passes <= 1
    quiet = Batch(CURVES["8B"], 8, MIXES["easy"], calibrator=calibrator)
    for _ in range(4):
        quiet.round(budget)
    assert budget.sizes(load(8, calibrator)).passes > 1


def test_drafting_comes_back_when_the_texts_become_easy() -> None:
    budget, calibrator = AutoBudget(96), Calibrator()
    wrong = Batch(CURVES["small"], 16, MIXES["wrong"], calibrator=calibrator)
    for _ in range(150):
        wrong.round(budget)
    easy = Batch(CURVES["small"], 16, MIXES["easy"], calibrator=calibrator)
    drafted = [easy.round(budget).sizes.passes > 1 for _ in range(300)]
    assert not any(drafted[:1]) and all(drafted[-20:])


def test_sizes_that_are_prepared_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that prepares them never waits for the computation, unless the batch is another one."""
    batch, budget = Batch(CURVES["8B"], 8, MIXES["easy"]), AutoBudget(96)
    for _ in range(12):
        batch.round(budget)
    computed, fastest = list[int](), budget._fastest
    monkeypatch.setattr(budget, "_fastest", lambda load, kept: computed.append(load.requests) or fastest(load, kept))
    calibrator = batch.calibrator
    budget.prepare(load(8, calibrator))
    computed.clear()
    for _ in range(40):
        assert budget.sizes(load(8, calibrator)).passes > 1
        assert budget.sizes(load(7, calibrator)).passes > 1
    assert not computed
    budget.prepare(load(8, calibrator))
    assert computed == [8]  # it is long since the last time
    budget.prepare(load(7, calibrator))
    assert computed == [8, 7]
    budget.sizes(load(3, calibrator))
    assert computed == [8, 7, 3]


def load(requests: int, calibrator: Calibrator, costs: Costs = CURVES["8B"], room: int = 100) -> Load:
    return Load(requests, 0, room, costs, calibrator)


def test_rows_fill_a_prepared_size() -> None:
    batch, budget = Batch(CURVES["8B"], 8, MIXES["easy"]), AutoBudget(96)
    for _ in range(20):
        assert batch.round(budget).sizes.rows in CURVES["8B"].verifies[0][1].sizes


def test_where_every_row_has_its_price_only_worthy_nodes_are_verified() -> None:
    costs = Costs.simple(0.02, (1, 64), (1.0, 4.0))
    batch, budget = Batch(costs, 4, MIXES["easy"]), AutoBudget(96)
    for _ in range(12):
        batch.round(budget)
    sizes = budget.sizes(load(4, batch.calibrator, costs))
    assert -4 < sizes.floor < 0 and sizes.rows > 4


class Graphs(Preparation):
    """Every width of draft passes and every number of rows takes `seconds` once."""

    def __init__(self, seconds: float):
        self.seconds, self.spent = seconds, 0.0
        self.known: set[object] = set()

    def drafts(self, passes: int, width: int) -> float:
        return 0.0 if ("draft", width) in self.known else self.seconds

    def verify(self, rows: int) -> float:
        return 0.0 if ("verify", rows) in self.known else self.seconds

    def run(self, sizes: Sizes) -> None:
        if sizes.passes:
            self.spent += self.drafts(sizes.passes, sizes.width) + self.verify(sizes.rows)
            self.known |= {("draft", sizes.width), ("verify", sizes.rows)}


@pytest.mark.parametrize("factor", [1, 20, 400])
def test_passes_are_prepared_where_that_saves_time(factor: float) -> None:
    """`factor`: the rounds that take as long as a preparation."""
    plain = CURVES["8B"].verify(8, 0)
    graphs = Graphs(factor * plain)
    batch, budget = Batch(CURVES["8B"], 8, MIXES["mixed"], preparation=graphs), AutoBudget(96)
    tokens = seconds = 0.0
    for _ in range(600):
        done = batch.round(budget)
        graphs.run(done.sizes)
        tokens, seconds = tokens + done.tokens, seconds + done.seconds
    free = Batch(CURVES["8B"], 8, MIXES["mixed"]).speed(AutoBudget(96), 400)
    lost = seconds - tokens / free  # because passes were not prepared
    assert 0 < graphs.spent <= 1.3 * lost / PREPARATION_SHARE + 2 * graphs.seconds
    assert factor > 20 or tokens / (seconds + graphs.spent) > 0.85 * free


@pytest.mark.parametrize("room", [1, 2, 3])
def test_no_pass_is_deeper_than_the_room(room: int) -> None:
    sizes = AutoBudget(96).sizes(load(2, Calibrator(), room=room))
    assert sizes.passes <= room - 1


def test_costs_of_a_batch_are_looked_up_by_its_totals() -> None:
    costs = CURVES["small"]
    found = load(8, Calibrator(), costs)
    assert found.verify(20) == costs.verify(20, 0) + costs.overhead
    assert found.drafting(3, 4) == costs.opening + costs.draft(8) + 2 * costs.draft(32)
    assert found.drafting(0, 4) == 0
    assert found.prepared(20) == 24
    assert found.sizes(40) == [8, 16, 24, 32]


def test_sizes_of_rivals_by_hand() -> None:
    given = load(4, Calibrator(), CURVES["small"])
    assert registry.policy("tetris", depth=5, mean=2).budget().sizes(given) == Sizes(5, 1, 1, 12)
    assert registry.policy("tetris", depth=5, capacity=7).budget().sizes(given) == Sizes(5, 1, 1, 11)
    found = registry.policy("batch-gt", c=0.25, eps=0.05, depth=3, k=2, nodes=9).budget().sizes(given)
    assert found == Sizes(3, 2, 2, 40, 10, np.log(0.2))
    assert registry.policy("beam", depth=2, k=3, nodes=7).budget().sizes(given) == Sizes(2, 3, 3, 28, 7)


def test_survival_learns_how_far_confidence_can_be_trusted() -> None:
    batch, budget = Batch(CURVES["8B"], 16, MIXES["wrong"]), registry.policy("survival").budget()
    first = budget.calibrator.probabilities(np.log([0.9]), np.array([1]), np.array([0]))
    for _ in range(30):
        batch.round(budget)
    assert budget.calibrator.probabilities(np.log([0.9]), np.array([1]), np.array([0])) < 0.4 * first


def test_smart_opens_fewer_levels_where_drafts_fail() -> None:
    passes = {}
    for mix in ("easy", "wrong"):
        batch, budget = Batch(CURVES["8B"], 8, MIXES[mix]), registry.policy("smart").budget()
        passes[mix] = [batch.round(budget).sizes.passes for _ in range(30)][-1]
    assert passes["easy"] >= 2


def test_every_method_of_the_simulation_is_registered() -> None:
    assert {name for name, _ in METHODS.values()} <= set(registry.policies())
