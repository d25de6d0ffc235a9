"""A text that another process generates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from windfall.core.detokenizer import Detokenizer, LateText
from windfall.core.step import Counts, PlainStep
from windfall.engine.handle import Progress
from windfall.serve.backend import Job
from windfall.serve.workers.messages import Details


class LateStep(PlainStep):
    """A Step whose text is decoded when it is first read."""

    late_text: LateText
    number: int

    @cached_property
    def text(self) -> str:
        return self.late_text[self.number]


class RemoteText(Progress):
    """Follows the Steps that arrive, and decodes their tokens.

    With stop strings, tokens are decoded when they arrive, as in the process of the engine; otherwise when their text
    is first read, many at once.
    """

    def __init__(self, number: int, job: Job, tokenizer: Any, cancel: Callable[[int], None]):
        """`job`: its prompt is token ids. `cancel` is called with the number if the text should end."""
        super().__init__(number, len(job.prompt), job.sampling.get("seed"))
        stop = tuple(job.sampling.get("stop") or ())
        self._cancel, self._tokens = cancel, list[int]()
        self._decoded = Detokenizer(tokenizer, stop, None if stop else self._tokens)
        self._late = None if stop else LateText(self._decoded)
        resumed = list(job.sampling.get("resume_token_ids") or ())
        self._push(resumed)
        self._decoded.take()  # the text that the client already has

    def cancel(self) -> None:
        if not (self.done or self.cancelled):
            super().cancel()
            self._cancel(self.number)

    def receive(self, tokens: tuple[int, ...], counts: Counts, details: Details | None, now: float) -> None:
        """A Step that came at this time."""
        step, finish = LateStep(tokens, counts), None
        if details is not None:
            finish = details.finish
            step = LateStep(tokens, counts, finish, details.logprobs, details.prompt_logprobs)
            if details.cycle is not None:
                step.add_tree(*details.cycle)
        self._push(tokens)
        if self._late is None:
            step.__dict__["text"] = self._decoded.take(final=finish is not None)
        else:
            step.__dict__.update(late_text=self._late, number=len(self._late))
            self._late.ends.append(len(self._tokens))
            self._late.final = finish is not None
        self.put(step, now)

    def _push(self, tokens: tuple[int, ...] | list[int]) -> None:
        if self._late is None:
            for token in tokens:
                self._decoded.push(token)
        else:
            self._tokens += tokens
