from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.core.tree import DraftTree


def build(parents: list[int]) -> DraftTree:
    """A tree of these parents; every node has its own token."""
    tree = DraftTree.root(100)
    for node, parent in enumerate(parents, 1):
        rank = sum(p == parent for p in parents[: node - 1])
        tree = tree.extend(
            torch.tensor([parent]), torch.tensor([node]), torch.tensor([-0.5 * (rank + 1)]), torch.tensor([rank])
        )
    return tree


trees = st.lists(st.integers(0, 1_000_000), max_size=24).map(lambda xs: build([x % (i + 1) for i, x in enumerate(xs)]))


@given(trees)
@settings(max_examples=60, deadline=None)
def test_mask_rows_are_the_paths(tree: DraftTree) -> None:
    tree.check()
    mask = tree.mask()
    for node in range(len(tree)):
        assert torch.nonzero(mask[node]).flatten().tolist() == sorted(tree.path(node))
        assert float(tree.score[node]) == pytest.approx(float(tree.logq[tree.path(node)].sum()), abs=1e-5)


@given(trees, st.data())
@settings(max_examples=60, deadline=None)
def test_select_keeps_the_paths(tree: DraftTree, data: st.DataObject) -> None:
    wanted = data.draw(st.sets(st.integers(0, len(tree) - 1)))
    keep = torch.tensor(sorted({0} | {a for node in wanted for a in tree.path(node)}))
    part = tree.select(keep)
    part.check()
    for place, node in enumerate(keep.tolist()):
        assert part.tokens[part.path(place)].tolist() == tree.tokens[tree.path(node)].tolist()


def test_a_tree_never_changes() -> None:
    tree = build([0, 0, 1])
    before = [array.copy() for array in tree.arrays]
    more = tree.measure(torch.tensor([1]), torch.tensor([0.5])).extend(
        torch.tensor([3]), torch.tensor([9]), torch.tensor([-1.0]), torch.tensor([0])
    )
    assert all(np.array_equal(old, now, equal_nan=True) for old, now in zip(before, tree.arrays, strict=True))
    assert float(more.entropy[1]) == 0.5 and more.path(4) == [0, 1, 3, 4] and float(more.score[4]) == -2.0
    assert [getattr(more, name).tolist()[:4] for name in ("tokens", "depth")] == [[100, 1, 2, 3], [0, 1, 1, 2]]


def test_select_refuses_an_orphan() -> None:
    with pytest.raises(AssertionError, match="parent must be kept"):
        build([0, 1]).select(torch.tensor([0, 2]))


def test_check_refuses_equal_siblings() -> None:
    tree = DraftTree.root(1).extend(torch.tensor([0, 0]), torch.tensor([5, 5]), torch.zeros(2), torch.tensor([0, 1]))
    with pytest.raises(AssertionError, match="different tokens"):
        tree.check()
