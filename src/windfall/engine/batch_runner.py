"""The interface between the scheduler and what runs the models: sequences join, take part in rounds, and leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from windfall.core.types import Step
from windfall.engine.sequence import Sequence
from windfall.engine.use import Use as Use

Outcome = Step | Exception  # an exception says why the sequence failed


class BatchRunner(Protocol):
    """Decodes the sequences that have joined. It is used by one thread at a time.

    The tokens, seed and parameters of a Sequence are its whole state. A sequence may therefore leave after any round,
    and join again later, in this or another runner: its text goes on as if it had stayed.
    """

    def join(self, sequences: list[Sequence]) -> None:
        """Accept these sequences. Their tokens are prefilled now, or before their first Step.

        If it raises, none of them has joined, and the sequences that run are not affected.
        """

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """Remove these sequences and free their memory; those that have not joined are ignored.

        A sequence may leave while a round of it is in flight. Its result is then dropped: the sequence gets no token
        from it, and no later `round` returns a Step of it.
        """

    def round(self) -> dict[Sequence, Outcome]:
        """One round of all sequences: the Step of each, or the exception with which it failed.

        A runner that works ahead returns Steps later: a round may have no Step of a sequence. A Step has been accepted
        by its sequence when it is returned. Sequences whose Step has a finish reason, or that failed, must leave
        before the next round. If `round` itself raises, all sequences that run have failed, and must leave, too.
        """

    def fits(self, lengths: Mapping[Sequence, int]) -> bool:
        """Whether there is memory for a round of these sequences, each with this number of tokens."""

    @property
    def has_room(self) -> bool:
        """Whether the sequences that run surely have memory for the next round; False: ask `fits`. It is asked in every
        round, so it must be cheap."""

    @property
    def max_length(self) -> int | None:
        """The number of tokens up to which a single sequence fits; None: any."""

    @property
    def use(self) -> Use:
        """What the last round took; asked after each round, so it must be cheap."""


def shorter(one: int | None, other: int | None) -> int | None:
    """The smaller of two limits; None: there is no limit."""
    return min((limit for limit in (one, other) if limit is not None), default=None)
