"""Choose the best nodes of a tree."""

from __future__ import annotations

import numpy as np

from windfall.core.tree import DraftTree, Floats, Integers

MANY_KEYS = 64  # above this many, partitioning before sorting is quicker


def best_places(keys: Floats, count: int) -> Integers:
    """The places of the `count` highest keys, best first; ties go to the earlier place."""
    if len(keys) > MANY_KEYS and 0 < count < len(keys):
        places = np.flatnonzero(keys >= lowest_of_best(keys, count))
        return places[np.argsort(-keys[places], kind="stable")[:count]]
    return np.argsort(-keys, kind="stable")[:count]


def lowest_of_best(keys: Floats, count: int) -> Floats:
    """The lowest of the `count` highest keys; there must be at least `count` keys."""
    place = len(keys) - count
    lowest: Floats = np.partition(keys, place)[place]
    return lowest


def best_nodes(tree: DraftTree, nodes: Integers, count: int, score: Floats | None = None) -> Integers:
    """The `count` nodes with the highest score, ascending; ties go to the shallower, then to the earlier node.

    With this tie rule the best nodes of a whole tree are closed under parents even where probabilities are exactly 1.
    `score` [N] replaces the tree's own; it must not rise from parent to child.
    """
    score = tree.arrays.score if score is None else score
    if count >= len(nodes):
        return np.sort(nodes)
    if count > 0:  # nodes that reach the last place: usually exactly `count`
        values = score[nodes]
        nodes = nodes[values >= lowest_of_best(values, count)]
    if len(nodes) > count:
        nodes = nodes[np.lexsort((tree.arrays.depth[nodes], -score[nodes]))]
    return np.sort(nodes[:count])
