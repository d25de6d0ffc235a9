"""What passes cost on this machine, in seconds: the other half of every decision about a tree."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Curve:
    """Seconds by size, sizes ascending; between them a line, or (`stepped`) the next size up, as on graphs."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    stepped: bool = False

    def at(self, size: float) -> float:
        """Seconds for this size; past the last one, the line over the upper half goes on."""
        place, last = bisect_left(self.sizes, size), len(self.sizes) - 1
        if place <= last and (self.stepped or self.sizes[place] == size):
            return self.seconds[place]
        if last == 0 or place == 0:
            return self.seconds[0]
        left, right = place - 1, min(place, last)
        if place > last:
            left = max(bisect_right(self.sizes, self.sizes[last] / 2) - 1, 0)  # a short last stretch would be all noise
        slope = (self.seconds[right] - self.seconds[left]) / (self.sizes[right] - self.sizes[left])
        return self.seconds[right] + max(slope, 0.0) * (size - self.sizes[right])

    @classmethod
    def of_dict(cls, given: Mapping[str, Any]) -> Curve:
        """From plain data; a ValueError says that it is no curve."""
        sizes, seconds = tuple(map(int, given["sizes"])), tuple(map(float, given["seconds"]))
        sound = (
            0 < len(sizes) == len(seconds) and list(sizes) == sorted(set(sizes)) and all(0 <= s < 1e9 for s in seconds)
        )
        if not sound:
            raise ValueError("a curve needs ascending sizes and as many finite seconds")
        return cls(sizes, seconds, bool(given.get("stepped", False)))


@dataclass(frozen=True)
class Costs:
    """A draft pass by width, a verify pass by rows and context length, and what a cycle costs besides.

    Some drafters do in a cycle's first draft pass what serves all of them: that is `opening`, on top of its width.

    In a batch the nodes and rows of all sequences count together, as they share the pass.
    """

    drafts: Curve
    verifies: tuple[tuple[int, Curve], ...]  # (context length, seconds by rows), lengths ascending
    overhead: float = 0.0
    opening: float = 0.0

    def draft(self, width: int) -> float:
        """One draft pass that expands this many nodes."""
        return self.drafts.at(width)

    def verify(self, rows: int, length: int) -> float:
        """One target pass over this many rows behind a context of this length."""
        lengths = [known for known, _ in self.verifies]
        return Curve(tuple(lengths), tuple(curve.at(rows) for _, curve in self.verifies)).at(length)

    def verify_curve(self, most: int, length: int) -> list[float]:
        """`verify` for 1 to `most` rows."""
        return [self.verify(rows, length) for rows in range(1, most + 1)]

    @property
    def ratio(self) -> float:
        """c = one draft pass over one plain step of the target."""
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


ASSUMED = Costs.simple(0.1, (1, 64), (1.0, 1.5))  # until something was measured: the shape of a GPU, in plain steps


def quickest_quarter(taken: Iterable[float]) -> float:
    """What a pass takes: whatever disturbs it only adds, and hits some sizes more than others."""
    ordered = sorted(taken)
    return ordered[(len(ordered) - 1) // 4]


def monotone(values: Sequence[float]) -> list[float]:
    """The nearest list (least squares) that never falls: neighbours in the wrong order share their mean."""
    pools: list[tuple[float, int]] = []  # (mean, how many); pool-adjacent-violators
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
