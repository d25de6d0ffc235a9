"""Every policy on table models: trees computed by hand, and what must hold for any input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.table import TableDrafter, draft, random_table
from windfall import registry
from windfall.core.options import options_of
from windfall.core.tree import DraftTree
from windfall.policies.ranking import best_nodes

HAND = [  # q(next | last); 0 is the root's token
    [0.0, 0.6, 0.3, 0.1],
    [0.0, 0.2, 0.7, 0.1],
    [0.0, 0.5, 0.1, 0.4],
    [0.0, 0.3, 0.3, 0.4],
]


def paths(tree: DraftTree, keep: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[tree.path(node)[1:]].tolist()) for node in keep.tolist() if node}


def test_chain_by_hand() -> None:
    tree, keep, passes = draft(registry.policy("chain", depth=3), TableDrafter(HAND))
    assert tree.tokens.tolist() == [0, 1, 2, 1]
    assert passes == 3
    assert tree.score.exp().tolist() == pytest.approx([1, 0.6, 0.42, 0.21])
    assert len(keep) == 4


def test_none_drafts_nothing() -> None:
    tree, keep, passes = draft(registry.policy("none"), TableDrafter(HAND))
    assert (len(tree), keep.tolist(), passes) == (1, [0], 0)


def test_fixed_tree_by_hand() -> None:
    """One first token (1, V=.6); its two best children 2 (.42) and 1 (.12); only the first is above tau=.2."""
    tree, keep, passes = draft(registry.policy("fixed-tree", depth=2, breadth=2, tau=0.2), TableDrafter(HAND))
    assert paths(tree, keep) == {(1,), (1, 2), (1, 1), (1, 2, 1), (1, 2, 3)}
    assert passes == 3


def test_fixed_tree_stops_at_its_size() -> None:
    tree, keep, _ = draft(registry.policy("fixed-tree", depth=6, breadth=3, tau=0.0, nodes=8), TableDrafter(HAND))
    assert len(keep) == 9
    assert paths(tree, keep) == {(1,), (1, 2), (1, 1), (1, 3), (1, 2, 1), (1, 2, 3), (1, 2, 2), (1, 1, 2)}


def test_beam_by_hand() -> None:
    """k=2: level 1 = {1: .6, 2: .3}; level 2 = {12: .42, 11: .12, 21: .15, 23: .12}; level 3 from 12 and 21."""
    tree, keep, passes = draft(registry.policy("beam", depth=3, k=2, nodes=6), TableDrafter(HAND))
    assert len(tree) == 1 + 2 + 4 + 4
    assert passes == 3
    assert paths(tree, keep) == {(1,), (1, 2), (2,), (1, 2, 1), (1, 2, 3)}


def test_beam_with_one_child_is_a_chain() -> None:
    for seed in range(5):
        drafter = TableDrafter(random_table(9, seed))
        chain, _, _ = draft(registry.policy("chain", depth=4), drafter)
        beam, keep, _ = draft(registry.policy("beam", depth=4, k=1), drafter)
        assert torch.equal(chain.tokens, beam.tokens)
        assert len(keep) == 5


def test_ties_keep_parents() -> None:
    """With probabilities of exactly 1 a child scores as high as its parent; the parent must come first."""
    certain = torch.roll(torch.eye(5), 1, 1)
    certain[0] = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])  # not a distribution, but a tie of four
    for nodes in range(1, 12):
        tree, keep, _ = draft(registry.policy("beam", depth=4, k=3, nodes=nodes), TableDrafter(certain))
        tree.select(keep).check()
        assert len(keep) == min(nodes, len(tree))


def test_best_breaks_ties_by_depth_then_age() -> None:
    tree = DraftTree.root(0).extend(torch.tensor([0, 0, 0]), torch.tensor([1, 2, 3]), torch.zeros(3), torch.arange(3))
    tree = tree.extend(torch.tensor([3]), torch.tensor([4]), torch.zeros(1), torch.zeros(1, dtype=torch.long))
    assert best_nodes(tree, np.arange(5), 4).tolist() == [0, 1, 2, 3]
    assert best_nodes(tree, np.array([4, 2]), 1).tolist() == [2]


@pytest.mark.parametrize("name", registry.policies())
@given(
    seed=st.integers(0, 10_000),
    sharpness=st.sampled_from([0.0, 0.5, 2.0, 30.0]),
    vocabulary=st.integers(2, 12),
    room=st.integers(1, 20),
)
@settings(max_examples=25, deadline=None)
def test_every_policy_on_any_input(name: str, seed: int, sharpness: float, vocabulary: int, room: int) -> None:
    """Ends; keeps the root and the parents of what it keeps; stays within its budget and the room."""
    policy = registry.policy(name)
    tree, keep, _ = draft(policy, TableDrafter(random_table(vocabulary, seed, sharpness)), room=room)
    tree.check()
    kept = tree.select(keep)
    kept.check()
    assert int(kept.depth.max()) <= max(room - 1, 0)
    if hasattr(policy, "nodes"):
        assert len(kept) <= policy.nodes + 1


@pytest.mark.parametrize("name", registry.policies())
def test_every_policy_explains_itself(name: str) -> None:
    policy = registry.policy_class(name)
    assert policy.__doc__
    assert policy.__module__.startswith("windfall.policies.")
    assert all(field.metadata["help"] for field in options_of(policy).values())
    fresh = registry.policy(name).fresh()
    assert fresh == registry.policy(name)
