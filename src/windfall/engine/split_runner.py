"""Requests that one runner cannot take run in another at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from windfall.engine.batch_runner import BatchRunner, Outcome, Use, shorter
from windfall.engine.sequence import Sequence

Lengths = Mapping[Sequence, int]  # the tokens of each sequence


class SplitRunner:
    """A `BatchRunner` of two. `suits` says whether the first can take a sequence; the second takes all others."""

    def __init__(
        self,
        first: BatchRunner,
        second: BatchRunner,
        suits: Callable[[Sequence], bool],
        fit_together: Callable[[Lengths, Lengths], bool] | None = None,
    ):
        """`fit_together(mine, others)`: whether sequences of both runners fit, if they share memory."""
        self.first, self.second, self._suits, self._fit_together = first, second, suits, fit_together
        self._mine: set[Sequence] = set()  # that run in the first
        self._others: set[Sequence] = set()  # that run in the second

    def join(self, sequences: list[Sequence]) -> None:
        mine = [sequence for sequence in sequences if self._suits(sequence)]
        others = [sequence for sequence in sequences if sequence not in mine]
        self.first.join(mine)
        try:
            self.second.join(others)
        except Exception:
            self.first.leave(mine)
            raise
        self._mine.update(mine)
        self._others.update(others)

    def leave(self, sequences: Iterable[Sequence]) -> None:
        leaving = list(sequences)
        self.first.leave(leaving)
        self._mine.difference_update(leaving)
        if self._others & {*leaving}:
            self.second.leave(leaving)
            self._others.difference_update(leaving)

    def round(self) -> dict[Sequence, Outcome]:
        found = self.first.round()
        return {**found, **self.second.round()} if self._others else found

    def fits(self, lengths: Mapping[Sequence, int]) -> bool:
        if not self._others and all(map(self._suits, lengths.keys() - self._mine)):
            return self.first.fits(lengths)
        new = lengths.keys() - self._mine - self._others
        others = {each: lengths[each] for each in {*new, *self._others} if each in lengths and not self._takes(each)}
        if not others:
            return self.first.fits(lengths)
        mine = {each: length for each, length in lengths.items() if each not in others}
        both = self._fit_together is None or self._fit_together(mine, others)
        return both and self.first.fits(mine) and self.second.fits(others)

    @property
    def has_room(self) -> bool:
        return not self._others and self.first.has_room

    def _takes(self, sequence: Sequence) -> bool:
        """Whether the first runner takes this sequence."""
        return sequence not in self._others and self._suits(sequence)

    @property
    def max_length(self) -> int | None:
        return shorter(self.first.max_length, self.second.max_length)

    @property
    def use(self) -> Use:
        """Of the memory that is fuller; the budget of the first runner, if it has one."""
        if not self._others:
            return self.first.use
        one, other = self.first.use, self.second.use
        known = [each.memory for each in (one, other) if each.memory is not None]
        return Use(max(known, default=None), one.budget or other.budget)
