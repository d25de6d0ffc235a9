"""Requests that run one after the other, each as it would alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from windfall.core.types import Step
from windfall.engine.batch_runner import Outcome, Use
from windfall.engine.sequence import Sequence


class SerialRunner:
    """A `BatchRunner` that decodes the sequence that joined first, while the others wait.

    On a GPU it decodes a request that needs the host in every cycle, while there is only one of them. Where the model
    cannot use a KV cache in pages, it decodes several, one after the other: in a padded batch, the logits of a text
    would depend on the other requests.
    """

    def __init__(self, decode: Callable[[Sequence], Iterator[Step]]):
        """`decode`: the Steps of a sequence, until it ends."""
        self._decode = decode
        self._queue: list[Sequence] = []  # the first is being decoded once `_steps` is set
        self._steps: Iterator[Step] | None = None

    def join(self, sequences: list[Sequence]) -> None:
        """Queue these sequences."""
        self._queue += sequences

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """Remove these sequences. One that runs is prefilled again if it comes back."""
        leaving = set(sequences)
        if self._queue and self._queue[0] in leaving:
            self._steps = None
        self._queue = [sequence for sequence in self._queue if sequence not in leaving]

    def round(self) -> dict[Sequence, Outcome]:
        """One cycle of the first sequence."""
        if not self._queue:
            return {}
        sequence = self._queue[0]
        self._steps = self._steps or self._decode(sequence)
        try:
            return {sequence: next(self._steps)}
        except Exception as error:
            return {sequence: error}

    def fits(self, lengths: Mapping[Sequence, int]) -> bool:
        return True

    @property
    def has_room(self) -> bool:
        return True

    @property
    def max_length(self) -> int | None:
        return None

    @property
    def use(self) -> Use:
        return Use()
