"""Sums over the steps of a text."""

from __future__ import annotations

import torch

from windfall.core.stats import Stats, Totals
from windfall.core.tree import DraftTree
from windfall.core.types import Split, Step


def step(tokens: int, children: int, verified: int, accepted: int, passes: int) -> Step:
    """A cycle with a tree of one level."""
    drafted = DraftTree.root(1)
    if children:
        parents = torch.zeros(children, dtype=torch.long)
        drafted = drafted.extend(parents, torch.arange(children), torch.zeros(children), torch.arange(children))
    kept = torch.arange(1 + verified)
    path, seconds = torch.arange(1 + accepted), Split(0.5, 1.0)
    return Step(tuple(range(tokens)), "", drafted.select(kept), path, drafted, kept, passes, seconds)


STEPS = [step(2, 5, 3, 1, 1), step(1, 0, 0, 0, 0), step(1, 4, 4, 1, 2)]  # the last ends before its own token


def test_totals_are_those_of_the_fields() -> None:
    assert Totals.of(STEPS) == Totals(cycles=3, tokens=4, rows=4 + 1 + 5, accepted=2, drafted=9, draft_passes=3)
    for each in STEPS:
        fields = (len(each.tokens), each.rows, each.accepted, each.drafted_tokens, each.draft_passes)
        assert each.counts == fields
    assert Totals.of([]) == Totals(0, 0, 0, 0, 0, 0)


def test_stats_of_a_text() -> None:
    stats = Stats.of(STEPS, 3.0, 1.0)
    assert (stats.tokens, stats.cycles, stats.rows, stats.draft_passes) == (4, 3, 10, 3)
    assert stats.split == Split(1.5, 3.0) and stats.tau == 4 / 3
