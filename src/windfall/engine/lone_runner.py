"""A text that runs alone, and texts that run together, in different runners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from windfall.engine.batch_runner import BatchRunner, Outcome, Use, shorter
from windfall.engine.sequence import Sequence


class LoneRunner:
    """A `BatchRunner` of two. A text that joins when no other runs is decoded by the first, until others join.

    It then moves to the second, which prefills it again. A text that is left over moves back if it no longer fits into
    the second's memory. On a GPU this is for texts that need the host: a single one drafts in CUDA graphs, or with a
    drafter on the host, and several share passes.
    """

    def __init__(self, alone: BatchRunner, together: BatchRunner):
        self._alone, self._together = alone, together
        self._lone: list[Sequence] = []  # the text that runs alone, if there is one
        self._others: set[Sequence] = set()  # that run together

    def join(self, sequences: list[Sequence]) -> None:
        if not sequences:
            return
        if len(sequences) == 1 and not self._lone and not self._others:
            self._alone.join(sequences)
            self._lone = list(sequences)
            return
        self._alone.leave(self._lone)
        try:
            self._together.join([*self._lone, *sequences])
        except Exception:
            self._alone.join(self._lone)
            raise
        self._others.update(self._lone, sequences)
        self._lone = []

    def leave(self, sequences: Iterable[Sequence]) -> None:
        leaving = list(sequences)
        self._alone.leave(leaving)
        self._together.leave(leaving)
        self._lone = [sequence for sequence in self._lone if sequence not in leaving]
        self._others.difference_update(leaving)

    def round(self) -> dict[Sequence, Outcome]:
        if len(self._others) == 1:
            self._move_back(*self._others)
        return self._active.round()

    def _move_back(self, last: Sequence) -> None:
        """Let the first runner decode the last text, if it does not fit into the memory of the second."""
        if self._together.has_room or self._together.fits({last: len(last.tokens)}):
            return
        self._together.leave([last])
        self._others.clear()
        self._alone.join([last])
        self._lone = [last]

    def fits(self, lengths: Mapping[Sequence, int]) -> bool:
        """A sequence that has not joined yet runs alone if no other runs."""
        runner = self._alone if len(lengths) == 1 and not self._others else self._together
        return runner.fits(lengths)

    @property
    def has_room(self) -> bool:
        return self._active.has_room

    @property
    def max_length(self) -> int | None:
        return shorter(self._alone.max_length, self._together.max_length)

    @property
    def use(self) -> Use:
        return self._active.use

    @property
    def _active(self) -> BatchRunner:
        return self._alone if self._lone else self._together
