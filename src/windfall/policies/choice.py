"""The rows of a verify pass over several requests."""

from __future__ import annotations

import numpy as np

from windfall.core.tree import Flags, Floats, Integers
from windfall.policies.budget import Sizes


def choose(owner: Integers, keys: Floats, requests: int, sizes: Sizes) -> Flags:
    """Which drafted nodes are verified: those with the highest keys, after the root of every request.

    Nodes are given request by request (`owner` ascends), parents before children, without the roots. Keys must not rise
    from parent to child. Ties go to the lower request, then to the earlier node, so a chosen node's parent is chosen.
    """
    order = np.argsort(-keys, kind="stable")
    order = order[keys[order] > sizes.floor]
    if sizes.per_request is not None:
        order = order[_place_in_group(owner[order], requests) < sizes.per_request - 1]
    chosen = np.zeros(len(keys), bool)
    chosen[order[: max(sizes.rows - requests, 0)]] = True
    return chosen


def _place_in_group(groups: Integers, count: int) -> Integers:
    """How many earlier entries have the same group."""
    order = np.argsort(groups, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(groups, minlength=count))[:-1]])
    place = np.empty(len(groups), np.int64)
    place[order] = np.arange(len(groups)) - starts[groups[order]]
    return place
