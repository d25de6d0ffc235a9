"""A request to generate a text, as the scheduler sees it."""

from __future__ import annotations

from typing import Protocol

from windfall.core.step import Step
from windfall.engine.handle import Handle as Handle
from windfall.engine.handle import Progress
from windfall.engine.sequence import Sequence


class Sink(Protocol):
    """Takes the Steps of a request in the place of its handle. The thread that generates calls it."""

    def put(self, step: Step, now: float) -> None:
        """A Step came now, in seconds of `time.perf_counter`. The last one has a finish reason."""

    def end(self, reason: str | None, error: Exception | None) -> None:
        """The text has ended without a last Step, for this reason or with this error."""


class Request(Progress):
    """A sequence, its deadline, and what was generated so far. The scheduler fills it; any thread may read it."""

    def __init__(self, number: int, sequence: Sequence, deadline: float | None = None, sink: Sink | None = None):
        """`deadline`: seconds from now after which the text ends as it is. `sink`: the Steps are not kept here."""
        super().__init__(number, sequence.prompt_length, sequence.params.seed)
        self.sequence, self._sink = sequence, sink
        self.expires = None if deadline is None else self.created + deadline

    def put(self, step: Step, now: float) -> None:
        if self._sink is None:
            super().put(step, now)
            return
        self.moments[:] = [now]
        if step.finish is not None:
            super().end(step.finish)
        self._sink.put(step, now)

    def end(self, reason: str) -> None:
        super().end(reason)
        if self._sink is not None:
            self._sink.end(reason, None)

    def fail(self, error: Exception) -> None:
        super().fail(error)
        if self._sink is not None:
            self._sink.end(None, error)
