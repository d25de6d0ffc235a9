"""What passes cost on this machine, in seconds: the other half of every decision about a tree."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Seconds by size, sizes ascending; between them a line, or (`stepped`) the next size up, as on graphs."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    stepped: bool = False

    def at(self, size: float) -> float:
        """Seconds for this size; past the last one, the line goes on."""
        place = bisect_left(self.sizes, size)
        if place < len(self.sizes) and (self.stepped or self.sizes[place] == size):
            return self.seconds[place]
        if len(self.sizes) == 1 or place == 0:
            return self.seconds[0]
        right = min(place, len(self.sizes) - 1)
        left = right - 1
        slope = (self.seconds[right] - self.seconds[left]) / (self.sizes[right] - self.sizes[left])
        return self.seconds[left] + max(slope, 0.0) * (size - self.sizes[left])


@dataclass(frozen=True)
class Costs:
    """A draft pass by width, a verify pass by rows and context length, and what a cycle costs besides."""

    drafts: Curve
    verifies: tuple[tuple[int, Curve], ...]  # (context length, seconds by rows), lengths ascending
    overhead: float = 0.0

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

    @classmethod
    def simple(cls, draft: float, rows: Sequence[int], seconds: Sequence[float], overhead: float = 0.0) -> Costs:
        """Flat draft passes, and verify passes that depend on rows alone."""
        return cls(Curve((1,), (draft,)), ((0, Curve(tuple(rows), tuple(seconds))),), overhead)


ASSUMED = Costs.simple(0.1, (1, 64), (1.0, 1.5))  # until something was measured: the shape of a GPU, in plain steps
