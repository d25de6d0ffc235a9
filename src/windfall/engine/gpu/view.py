"""What the host sees of a tree that grows on the device, as far as a plan watches it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
ROOT: Integers = np.zeros(1, dtype=np.int64)


class TreeView:
    """Arrays as they came with a draft pass; a plan's `watches` say which.

    The nodes of a level lie side by side: the children of the likeliest node that was expanded for it, then those of
    the next. An empty place has a log-probability and a score of -inf.
    """

    def __init__(self, arrays: Mapping[str, Any], width: int, k: int, lag: int):
        self._own = arrays
        self._width, self._k, self._lag = width, k, lag
        self._scores: dict[int, Floats] = {}  # by level

    @property
    def promise(self) -> list[float]:
        """See kernels.trees.Ahead."""
        found: list[float] = self._own["promise"].tolist()
        return found

    @property
    def length(self) -> int:
        """Committed tokens, the root included."""
        found: int = self._own["length"].item(0)
        return found + self._lag - 1

    def start(self, level: int) -> int:
        """The first place of a level."""
        return 1 + self._k * (1 + self._width * (level - 2)) if level > 1 else level

    def scores(self, level: int) -> Floats:
        """Of a level's places."""
        if level not in self._scores:
            self._scores[level] = self._own["score"][self.start(level) : self.start(level + 1)]
        return self._scores[level]

    def all_scores(self, level: int, root: bool = False) -> Floats:
        """Of all places up to this level, usually without the root's."""
        found: Floats = self._own["score"][0 if root else 1 : self.start(level + 1)]
        return found

    def logq(self, level: int) -> Floats:
        """[k] of the children of the likeliest node that was expanded for this level."""
        start = self.start(level)
        found: Floats = self._own["logq"][start : start + self._k]
        return found

    def expanded(self, level: int) -> Integers:
        """The places of the nodes that were expanded for this level, the likeliest first, below 0 for none."""
        first = self._width * (level - 2)
        found: Integers = self._own["expanded"][first : first + self._width] if level > 1 else ROOT
        return found

    def entropies(self, level: int) -> Floats:
        """In nats, after those nodes."""
        first = self._width * (level - 2) + 1
        found: Floats = self._own["entropy"][first : first + self._width] if level > 1 else self._own["entropy"][:1]
        return found

    def entropy(self, level: int) -> float:
        """After the likeliest of them."""
        return float(self.entropies(level)[0])

    def leader(self, level: int) -> float:
        """The score of the likeliest of them."""
        return float(self._own["score"][self.expanded(level)[0]])


class Order:
    """A cycle's numbers in the order in which the host would have drafted their nodes: its passes take their nodes by
    index, the device's take the likeliest first."""

    def __init__(self, places: int, k: int):
        self._k = k
        self._index = np.zeros(places, dtype=np.int64)  # by place, on the host
        self._scores: list[Floats] = []  # by level
        self._entropies: list[Floats] = []

    def begin(self) -> None:
        """Another cycle."""
        self._scores, self._entropies = [], []

    def follow(self, level: int, seen: TreeView, entropy: bool) -> tuple[list[Floats], list[Floats]]:
        """By level up to this one: the scores of its nodes, and the entropies after the nodes expanded for it."""
        while len(self._scores) < level:
            self._learn(len(self._scores) + 1, seen, entropy)
        return self._scores, self._entropies

    def _learn(self, level: int, seen: TreeView, entropy: bool) -> None:
        expanded, start, scores = seen.expanded(level), seen.start(level), seen.scores(level)
        rows = np.argsort(self._index[expanded], kind="stable")
        order = (rows[:, None] * self._k + np.arange(self._k)).ravel()
        self._index[start + order] = start + np.arange(len(order))
        found = scores[order]
        self._scores.append(found[found > -math.inf])
        self._entropies.append(seen.entropies(level)[rows[expanded[rows] >= 0]] if entropy else scores[:0])
