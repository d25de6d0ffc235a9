"""Children of the trees of several sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.trees import random_tree
from windfall.core.sampling import Dice
from windfall.core.types import Grow, SamplingParams
from windfall.drafters.base import add_children, add_children_to_all

VOCABULARY = 40


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("names", [None, torch.arange(3, 3 + VOCABULARY)], ids=["all tokens", "some tokens"])
def test_they_are_those_of_each_tree_alone(coupled: bool, names: torch.Tensor | None) -> None:
    """Also where trees want other numbers of children, or entropies, or nothing."""
    torch.manual_seed(0)
    trees = [random_tree(size, size, 30) for size in (1, 7, 4, 3)]
    grows = [
        Grow(torch.tensor([0]), 5),
        Grow(torch.tensor([2, 5, 6]), 3, entropy=True),
        None,
        Grow(torch.tensor([1, 2]), 99),
    ]
    params = SamplingParams(temperature=0.8, seed=3, top_k=20)
    dice = [Dice(params, [1, 2]), None, Dice(params, [4]), Dice(params, [5, 6, 7])] if coupled else [None] * 4
    logits = torch.randn(6, VOCABULARY, dtype=torch.bfloat16)
    found = add_children_to_all(trees, grows, logits, dice, names)
    row = 0
    for tree, grow, own, made in zip(trees, grows, dice, found, strict=True):
        if grow is None:
            assert made is tree
            continue
        logq = torch.log_softmax(logits[row : row + len(grow.nodes)].float(), -1)
        wanted = add_children(tree, grow, logq, own, names)
        row += len(grow.nodes)
        for one, other in zip(made.arrays, wanted.arrays, strict=True):
            np.testing.assert_array_equal(one, other)
