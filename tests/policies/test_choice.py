"""The rows of a shared verify pass, against a choice that is made node by node."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.policies.budget import Sizes
from windfall.policies.choice import choose


def forest(requests: int, nodes: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random trees: owner, parent (-1: the root) and key of each node. Many keys are equal."""
    random = np.random.default_rng(seed)
    owner = np.sort(random.integers(requests, size=nodes))
    parents, keys = np.full(nodes, -1), np.zeros(nodes)
    for node in range(nodes):
        first = int(np.searchsorted(owner, owner[node]))
        parents[node] = random.choice([-1, *range(first, node)])
        above = 0.0 if parents[node] < 0 else keys[parents[node]]
        keys[node] = above - random.integers(3) / 2
    return owner, parents, keys


def node_by_node(owner: np.ndarray, keys: np.ndarray, requests: int, sizes: Sizes) -> set[int]:
    """Take the best node that is allowed, until there is none."""
    chosen: set[int] = set()
    used = [1] * requests  # rows: the roots
    for node in sorted(range(len(keys)), key=lambda i: (-keys[i], owner[i], i)):
        full = sizes.per_request is not None and used[owner[node]] >= sizes.per_request
        if sum(used) < sizes.rows and not full and keys[node] > sizes.floor:
            used[owner[node]] += 1
            chosen.add(node)
    return chosen


@settings(max_examples=200, deadline=None)
@given(
    requests=st.integers(1, 6),
    nodes=st.integers(0, 40),
    rows=st.integers(0, 40),
    per_request=st.none() | st.integers(1, 8),
    floor=st.sampled_from([-math.inf, -2.0, -1.0, 0.0]),
    seed=st.integers(0, 10_000),
)
def test_the_choice_is_the_best_nodes_within_all_limits(
    requests: int, nodes: int, rows: int, per_request: int | None, floor: float, seed: int
) -> None:
    owner, parents, keys = forest(requests, nodes, seed)
    sizes = Sizes(4, 4, 4, rows, per_request, floor)
    chosen = choose(owner, keys, requests, sizes)
    assert set(np.flatnonzero(chosen)) == node_by_node(owner, keys, requests, sizes)
    above = parents[chosen]
    assert chosen[above[above >= 0]].all(), "a chosen node's parent is chosen"


def test_nodes_that_left_their_tree_are_never_chosen() -> None:
    keys = np.array([-1.0, -np.inf, -2.0])
    assert choose(np.array([0, 0, 1]), keys, 2, Sizes(1, 1, 2, 9)).tolist() == [True, False, True]


def test_ties_go_to_the_lower_request_then_to_the_earlier_node() -> None:
    owner, keys = np.array([0, 0, 1, 1]), np.zeros(4)
    found = [choose(owner, keys, 2, Sizes(1, 1, 2, rows)).tolist() for rows in (2, 3, 5)]
    assert found == [[False] * 4, [True, False, False, False], [True, True, True, False]]
