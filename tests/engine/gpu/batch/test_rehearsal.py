"""A GPU that prepares for batches: later passes find their graphs, and nothing else changes."""

from __future__ import annotations

import pytest

from helpers.gpu import engine
from helpers.tiny import prompt
from windfall import registry
from windfall.engine.gpu.batch.prefill import SHARED_ROWS
from windfall.engine.gpu.batch.round import ROUND_ROWS
from windfall.engine.gpu.batch.runner import PENDING
from windfall.engine.gpu.graphs import GraphCache, Key
from windfall.policies.auto_budget import WIDTHS


@pytest.mark.parametrize("policy", ["none", "chain", "auto"])
def test_later_passes_find_their_graphs(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Key] = []
    run = GraphCache.run
    monkeypatch.setattr(GraphCache, "run", lambda self, key, work: (runs.append(key), run(self, key, work)))
    device = engine("llama", "itself", policy, graphs=True, max_position_embeddings=2048, max_requests=2)
    device.prepare((0.0,))
    prepared = {*runs}
    assert {key[0] for key in prepared} >= ({"step"} if policy == "none" else {"verify", "first draft pass"})
    assert {key[2] for key in prepared if key[0] in ("step", "verify")} == {0, SHARED_ROWS}
    runs.clear()
    found = device.generate_batch([prompt(9), prompt(12)], max_new_tokens=12, eos=())
    assert {*runs} <= prepared and {"batch prefill", "admit"} <= {key[0] for key in runs}
    device.policy = registry.policy("none")
    wanted = device.generate_batch([prompt(9), prompt(12)], max_new_tokens=12, eos=())
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]


def test_little_memory_prepares_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: set[tuple[object, ...]] = set()
    run = GraphCache.run
    monkeypatch.setattr(GraphCache, "run", lambda self, key, work: (prepared.add(key[:3]), run(self, key, work)))
    device = engine("llama", "itself", "auto", True, max_position_embeddings=2048, max_requests=1, kv_memory="300KB")
    device.prepare((0.0,))
    runner = device._paged_runner()
    assert runner is not None and runner.max_length_of(1) < 100  # too short for the sizes below
    usual = {sizes.rows for sizes in runner.budget.usual_sizes(1, ROUND_ROWS) if sizes.passes}
    assert {("verify", rows, shared) for rows in usual for shared in (0, SHARED_ROWS)} <= prepared
    # a first draft pass takes in the tokens that the last round may have accepted, 2, 4, 8 or 16
    assert {("first draft pass", pending, width) for pending in PENDING[1:] for width in WIDTHS} <= prepared


def test_pages_are_free_again_and_nothing_is_learned() -> None:
    device = engine("llama", "eagle3", "survival", graphs=True, max_position_embeddings=2048, max_requests=2)
    shares: list[float] = []
    device.prepare(progress=shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]
    assert all(calibrator.observed == 0 for calibrator in device.calibrators.values())
    made = device._dispatcher.paged(device.policy, device.online_costs, 2, None)
    runner = made and made.rounds
    assert runner is not None and runner.pool.available == runner.pool.pages and not runner.busy and runner.learns


def test_on_a_cpu_nothing_happens() -> None:
    device = engine("llama", "itself", "auto", graphs=False)
    device.prepare(progress=lambda share: pytest.fail("there is nothing to prepare"))
