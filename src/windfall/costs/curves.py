"""The cost of draft and verify passes on this machine, in seconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Seconds by size, in ascending order. Values between sizes are interpolated, or (`stepped`, for CUDA graphs, which
    run in a few sizes) those of the next size up."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    stepped: bool = False

    def at(self, size: float) -> float:
        """Seconds for this size; past the last one, extrapolated from the upper half of the sizes."""
        place, last = bisect_left(self.sizes, size), len(self.sizes) - 1
        if place <= last and (self.stepped or self.sizes[place] == size):
            return self.seconds[place]
        if last == 0 or place == 0:
            return self.seconds[0]
        left, right = place - 1, min(place, last)
        if place > last:
            # the slope between the last two sizes alone would be noisy
            left = max(bisect_right(self.sizes, self.sizes[last] / 2) - 1, 0)
        slope = (self.seconds[right] - self.seconds[left]) / (self.sizes[right] - self.sizes[left])
        return self.seconds[right] + max(slope, 0.0) * (size - self.sizes[right])

    def over(self, sizes: NDArray[np.int64]) -> Reals:
        """`at` for many sizes."""
        own, seconds, last = np.array(self.sizes), np.array(self.seconds), len(self.sizes) - 1
        place = np.searchsorted(own, sizes)
        right = np.minimum(place, last)
        if last == 0:
            return seconds[right]
        left = np.maximum(np.where(place > last, bisect_right(self.sizes, self.sizes[last] / 2) - 1, place - 1), 0)
        run = np.maximum(own[right] - own[left], 1)
        slope = np.maximum((seconds[right] - seconds[left]) / run, 0.0)
        exact = (place <= last) & (self.stepped | (own[right] == sizes)) | (place == 0)
        found: Reals = np.where(exact, seconds[right], seconds[right] + slope * (sizes - own[right]))
        return found

    @classmethod
    def of_dict(cls, given: Mapping[str, Any]) -> Curve:
        """From plain data; a ValueError if it is not a curve."""
        sizes, seconds = tuple(map(int, given["sizes"])), tuple(map(float, given["seconds"]))
        sound = (
            0 < len(sizes) == len(seconds) and list(sizes) == sorted(set(sizes)) and all(0 <= s < 1e9 for s in seconds)
        )
        if not sound:
            raise ValueError("a curve needs ascending sizes and as many finite seconds")
        return cls(sizes, seconds, bool(given.get("stepped", False)))


@dataclass(frozen=True)
class Costs:
    """The cost of a draft pass by width, of a verify pass by rows and context length, and of the rest of a cycle.

    `opening` is what the first draft pass of a cycle costs in addition, in drafters that prepare later passes there.
    In a batch, width and rows are those of all sequences together, because they share the pass.
    """

    drafts: Curve
    verifies: tuple[tuple[int, Curve], ...]  # (context length, seconds by rows), lengths ascending
    overhead: float = 0.0
    opening: float = 0.0

    @cached_property
    def _hash(self) -> int:
        return hash((self.drafts, self.verifies, self.overhead, self.opening))

    def __hash__(self) -> int:
        return self._hash  # policies look up what they derived from these costs several times in a cycle

    def draft(self, width: int) -> float:
        """One draft pass that expands this many nodes."""
        return self.drafts.at(width)

    def verify(self, rows: int, length: int) -> float:
        """One target pass over this many rows after a context of this length."""
        lengths = [known for known, _ in self.verifies]
        return Curve(tuple(lengths), tuple(curve.at(rows) for _, curve in self.verifies)).at(length)

    def verify_over(self, rows: NDArray[np.int64], length: int) -> Reals:
        """`verify` for many numbers of rows."""
        lengths, last = [known for known, _ in self.verifies], len(self.verifies) - 1
        place = bisect_left(lengths, length)
        if last == 0 or place == 0 or (place <= last and lengths[place] == length):
            return self.verifies[min(place, last)][1].over(rows)
        left, right = place - 1, min(place, last)
        if place > last:
            left = max(bisect_right(lengths, lengths[last] / 2) - 1, 0)
        near, far = (self.verifies[each][1].over(rows) for each in (left, right))
        slope = np.maximum((far - near) / (lengths[right] - lengths[left]), 0.0)
        found: Reals = far + slope * (length - lengths[right])
        return found

    def verify_curve(self, max_rows: int, length: int) -> list[float]:
        """`verify` for 1 to `max_rows` rows."""
        return [self.verify(rows, length) for rows in range(1, max_rows + 1)]

    @property
    def ratio(self) -> float:
        """c: the cost of one draft pass over that of one plain step of the target."""
        return self.draft(1) / self.verify(1, self.verifies[0][0])

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        verifies = [{"length": length, **asdict(curve)} for length, curve in self.verifies]
        rest = {"overhead": self.overhead, "opening": self.opening}
        return {"drafts": asdict(self.drafts), "verifies": verifies, **rest}

    @classmethod
    def of_dict(cls, given: Mapping[str, Any]) -> Costs:
        """From what `as_dict` gave; damaged data is a ValueError, KeyError or TypeError."""
        verifies = tuple((int(each["length"]), Curve.of_dict(each)) for each in given["verifies"])
        lengths = [length for length, _ in verifies]
        if not lengths or lengths != sorted(set(lengths)):
            raise ValueError("verify passes need ascending lengths")
        overhead, opening = float(given["overhead"]), float(given.get("opening", 0.0))
        return cls(Curve.of_dict(given["drafts"]), verifies, overhead, opening)

    @classmethod
    def simple(cls, draft: float, rows: Sequence[int], seconds: Sequence[float], overhead: float = 0.0) -> Costs:
        """Flat draft passes, and verify passes that depend on rows alone."""
        return cls(Curve((1,), (draft,)), ((0, Curve(tuple(rows), tuple(seconds))),), overhead)


ASSUMED = Costs.simple(0.1, (1, 64), (1.0, 1.5))  # before anything is measured: typical of a GPU, in plain steps


def quickest_quarter(taken: Iterable[float]) -> float:
    """The time of a pass, from several runs: disturbances only add to it, so the fast runs are the true ones."""
    ordered = sorted(taken)
    return ordered[(len(ordered) - 1) // 4]


def monotone(values: Sequence[float]) -> list[float]:
    """Isotonic regression: the nearest list (least squares) that never falls, by pool-adjacent-violators."""
    pools: list[tuple[float, int]] = []  # mean and size
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
