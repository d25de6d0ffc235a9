"""The texts that answer one request: followed together, and cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from windfall.core.logprobs import TokenLogprob
from windfall.core.stats import Totals
from windfall.core.step import NodeArrays, PlainStep, Step
from windfall.engine.generation import Generation, text_of
from windfall.engine.handle import CANCELLED, Handle
from windfall.serve.errors import shutting_down
from windfall.serve.protocol import Speculation, Usage

Ended = TypeVar("Ended", "Generation", "End")

STOP, LENGTH = "stop", "length"  # finish reasons of OpenAI's API
EVENT_SECONDS = 6e-4  # between two events of all streams together: the engine's thread needs the rest of the time
MOST_EVENT_SECONDS = 0.05  # between two events of a stream, on account of others


class JoinedSteps(NamedTuple):
    """Steps that are sent together."""

    steps: list[Step]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None

    @classmethod
    def of(cls, steps: list[Step]) -> JoinedSteps:
        found = None if steps[0].logprobs is None else tuple(each for step in steps for each in step.logprobs or ())
        return cls(steps, text_of(steps), found, steps[0].prompt_logprobs)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for step in self.steps for token in step.tokens)


Piece = Step | JoinedSteps  # of a text


class End(NamedTuple):
    """The end of a text in a stream. A Generation would take a look at each Step."""

    finish_reason: str
    empty: bool  # whether the text has no Steps


class Texts:
    """Submitted texts, `n` for each prompt."""

    def __init__(self, handles: list[Handle], n: int = 1, prompts_only: bool = False):
        """`prompts_only`: leave out the new tokens; each text must have one."""
        self._handles, self._n, self._prompts_only = handles, n, prompts_only

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def handles(self) -> tuple[Handle, ...]:
        return tuple(self._handles)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; each counts once."""
        return sum(handle.prompt_tokens for handle in self._handles[:: self._n])

    @property
    def totals(self) -> Totals:
        """Sums over the Steps of all texts so far."""
        return Totals(*map(sum, zip(*(handle.totals for handle in self._handles), strict=True)))

    def cancel(self) -> None:
        """End the texts that have not ended."""
        for handle in self._handles:
            handle.cancel()

    async def results(self) -> list[Generation]:
        """The finished texts; if one fails, or the caller is cancelled, all are cancelled."""
        try:
            return [self._answer(checked(await handle)) for handle in self._handles]
        finally:
            self.cancel()

    async def pieces(self, streams: Callable[[], int] | None) -> AsyncGenerator[tuple[int, Piece | End], None]:
        """The Steps of all texts with the text's number, as they happen; after the last Step, the End.

        `streams`: the number of texts that run now; the more there are, the more Steps are joined. None: every Step is
        a piece.
        """
        if len(self._handles) == 1:
            try:
                async for only in _pieces(self._handles[0], streams):
                    yield 0, self._shown(only)
            finally:
                self.cancel()
            return
        queue: asyncio.Queue[tuple[int, Piece | End | Exception]] = asyncio.Queue()
        tasks = [asyncio.create_task(_follow(n, handle, queue, streams)) for n, handle in enumerate(self._handles)]
        try:
            left = len(tasks)
            while left:
                number, piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                left -= isinstance(piece, End)
                yield number, self._shown(piece)
        finally:
            self.cancel()
            for task in tasks:
                task.cancel()

    def _shown(self, piece: Piece | End) -> Piece | End:
        if not self._prompts_only:
            return piece
        if isinstance(piece, End):
            return piece if piece.empty else piece._replace(finish_reason=LENGTH)
        return _prompt_of(piece.steps[0] if isinstance(piece, JoinedSteps) else piece)

    def _answer(self, done: Generation) -> Generation:
        if not (self._prompts_only and done.steps):
            return done
        return replace(done, text="", token_ids=[], finish_reason=LENGTH, steps=[_prompt_of(done.steps[0])])

    def seconds(self, number: int, cycle: int) -> float:
        """The time from the submission of a text to the end of this cycle."""
        return self._handles[number].times[cycle]

    def usage(self) -> Usage:
        """Tokens and passes of all texts; each prompt counts once."""
        totals, prompt = self.totals, self.prompt_tokens
        if self._prompts_only:
            totals = totals._replace(tokens=0, accepted=0)
        speculation = Speculation(
            target_passes=totals.cycles,
            draft_passes=totals.draft_passes,
            drafted_tokens=totals.drafted,
            verified_tokens=totals.rows - totals.cycles,
            accepted_tokens=totals.accepted,
            tokens_per_pass=round(totals.tokens / totals.cycles, 4) if totals.cycles else 0.0,
        )
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=totals.tokens,
            total_tokens=prompt + totals.tokens,
            speculation=speculation,
        )


def _prompt_of(step: Step) -> Step:
    """The first Step of a text without its token; it has the log-probabilities of the prompt."""
    logprobs = None if step.logprobs is None else ()
    made = PlainStep((), (0, 1, 0, 0, 0), LENGTH, logprobs, step.prompt_logprobs)
    made.add_tree(NodeArrays.root(0), step.seconds, whole_tree=True)
    return made


async def _follow(
    number: int,
    handle: Handle,
    queue: asyncio.Queue[tuple[int, Piece | End | Exception]],
    streams: Callable[[], int] | None,
) -> None:
    try:
        async for piece in _pieces(handle, streams):
            queue.put_nowait((number, piece))
    except Exception as error:
        queue.put_nowait((number, error))


async def _pieces(handle: Handle, streams: Callable[[], int] | None) -> AsyncGenerator[Piece | End, None]:
    """The pieces of one text, and then its End."""

    def pause() -> float:
        return 0.0 if streams is None else min(EVENT_SECONDS * (streams() - 1), MOST_EVENT_SECONDS)

    empty = True
    async for steps in handle.arrivals(pause):
        empty = False
        for piece in steps if streams is None or len(steps) == 1 else [JoinedSteps.of(steps)]:
            yield piece
    yield checked(End(handle.finish_reason or CANCELLED, empty))


def checked(done: Ended) -> Ended:
    """The text; an error if the engine has cancelled it, which it does only when it closes."""
    if done.finish_reason == CANCELLED:
        raise shutting_down()
    return done


def finish_reason(done: Generation | End) -> str:
    """A text that ends at its deadline is cut off, as at its maximum length."""
    return STOP if done.finish_reason == STOP else LENGTH
