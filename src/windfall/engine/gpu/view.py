"""The part of a tree on the device that a draft pass reports, for the plan's decision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from windfall.core.tree import Floats
from windfall.policies.plan import NotWatched, Summary


class DeviceView:
    """A TreeView of the arrays that a draft pass reported; the plan's `watches` say which.

    The nodes of a level lie side by side: the children of the first node that was expanded for it, then those of the
    next. An empty place has a score of -inf.
    """

    def __init__(self, arrays: Mapping[str, Any], width: int, k: int, draw_offset: int):
        self._arrays = arrays
        self._width, self._k, self._draw_offset = width, k, draw_offset

    def _array(self, name: str) -> Any:
        try:
            return self._arrays[name]
        except KeyError:
            raise NotWatched(name) from None

    @property
    def length(self) -> int:
        return int(self._array("length").item(0)) + self._draw_offset - 1

    def summary(self, level: int) -> Summary:
        return Summary(*self._array("summary")[level].tolist())

    def scores(self, level: int) -> Floats:
        return _without_empty(self._array("score")[self._start(level) : self._start(level + 1)])

    def all_scores(self, level: int) -> Floats:
        return _without_empty(self._array("score")[1 : self._start(level + 1)])

    def parent_score(self, level: int) -> float:
        expanded = self._array("expanded")
        return float(self._array("score")[expanded[self._width * (level - 2)] if level > 1 else 0])

    def logq(self, level: int) -> Floats:
        start = self._start(level)
        return _without_empty(self._array("logq")[start : start + self._k])

    def entropies(self, level: int) -> Floats:
        if level == 1:
            found: Floats = self._array("entropy")[:1]
            return found
        first = self._width * (level - 2)
        entropies: Floats = self._array("entropy")[first + 1 : first + 1 + self._width]
        real: Floats = entropies[self._array("expanded")[first : first + self._width] >= 0]
        return real

    def _start(self, level: int) -> int:
        """The first place of a level."""
        return 1 + self._k * (1 + self._width * (level - 2)) if level > 1 else level


def _without_empty(values: Floats) -> Floats:
    """The values of places that are not empty."""
    if len(values) and values[values.argmin()] == -math.inf:
        found: Floats = values[values > np.float32(-math.inf)]
        return found
    return values
