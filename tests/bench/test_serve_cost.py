"""benchmarks/serve_cost.py: its made-up engine answers requests as a real one does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.tiny import tiny
from windfall.drafters.ngram import NGramDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target
from windfall.policies.none import NoSpeculation

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from serve_cost import MadeUpRunner


def test_requests_end_with_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Target(tiny()), NGramDrafter(), NoSpeculation())
    made_up = MadeUpRunner([5, 6, 7, 8], 0)
    monkeypatch.setattr(engine, "_batch_runner", lambda: made_up)
    with engine:
        handles = [engine.submit([1, 2], max_new_tokens=length, eos=()) for length in (1, 5)]
        found = [handle.result(timeout=20).token_ids for handle in handles]
    assert list(map(len, found)) == [1, 5] and {*found[1]} <= {5, 6, 7, 8}
