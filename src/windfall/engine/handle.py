"""The handle with which the caller of a request follows its text. This module does not import torch."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from windfall.core.stats import Totals
from windfall.core.step import Step
from windfall.engine.generation import Generation
from windfall.engine.loop_calls import call_in

CANCELLED, DEADLINE = "cancelled", "deadline"  # finish reasons


class Progress:
    """What was generated of a text so far. One thread fills it; any thread may read it."""

    def __init__(self, number: int, prompt_tokens: int, seed: int | None):
        self.number, self.prompt_tokens, self.seed = number, prompt_tokens, seed
        self.created = time.perf_counter()
        self.cancelled = False
        self.finish: str | None = None
        self.error: Exception | None = None
        self.steps: list[Step] = []
        self.moments: list[float] = []  # when each Step came, in seconds of `time.perf_counter`
        self.changed = threading.Condition()
        self._watchers = 0  # threads that wait for the next Step
        self._calls: list[Callable[[], None]] = []  # called once, after the next change
        self._end_calls: list[Callable[[], None]] = []  # called at the end

    def cancel(self) -> None:
        """Let the text end soon."""
        self.cancelled = True

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def times(self) -> list[float]:
        """Seconds from `created` to each Step."""
        return [at - self.created for at in self.moments]

    def put(self, step: Step, now: float) -> None:
        """Add a Step that came now; the last one has a finish reason.

        This is called for every request in every round, and takes the lock only if somebody waits. That is safe because
        those who wait look for new Steps after they have said so.
        """
        self.moments.append(now)
        self.steps.append(step)
        if step.finish is not None:
            self.end(step.finish)
        elif self._watchers or self._calls:
            with self.changed:
                calls = self._wake()
            self._make(calls)

    def end(self, reason: str) -> None:
        """The text ends here, for this reason."""
        with self.changed:
            self.finish = reason
            calls = self._wake()
        self._make(calls)

    def fail(self, error: Exception) -> None:
        """The text ends with this error, which the handle raises."""
        clear_frames(error)
        with self.changed:
            self.error = error
            calls = self._wake()
        self._make(calls)

    def _wake(self) -> list[Callable[[], None]]:
        """Wake the threads that wait; returns the calls to make."""
        self.changed.notify_all()
        calls, self._calls = self._calls, []
        if self.done:
            calls, self._end_calls = [*calls, *self._end_calls], []
        return calls

    def _make(self, calls: list[Callable[[], None]]) -> None:
        for call in calls:
            try:
                call()
            except Exception:  # of the caller's own code: other requests must go on
                logging.getLogger(__name__).exception("the callback of request %d failed", self.number)

    def call_on_change(self, call: Callable[[], None], known_steps: int) -> bool:
        """Call this after the next change; False if there is more than the known number of Steps already."""
        with self.changed:
            self._calls.append(call)
            if self.done or len(self.steps) > known_steps:
                self._calls.remove(call)
                return False
            return True

    def wait_for_more(self, known_steps: int) -> list[Step]:
        """Wait for more than this number of Steps; returns the new ones, none if the text has ended."""
        with self.changed:
            self._watchers += 1
            try:
                self.changed.wait_for(lambda: self.done or len(self.steps) > known_steps)
                return self.steps[known_steps:]
            finally:
                self._watchers -= 1

    def call_at_end(self, call: Callable[[], None]) -> None:
        """Call this when the text has ended, at once if it has."""
        with self.changed:
            if not self.done:
                self._end_calls.append(call)
                return
        call()

    def generation(self) -> Generation:
        """The finished text; raises the error with which it failed."""
        if self.error is not None:
            raise self.error
        made = Generation.of(self.steps, self.times, self.prompt_tokens, self.seed)
        return replace(made, finish_reason=self.finish or made.finish_reason)


def clear_frames(error: Exception) -> None:
    """Clear the variables of the calls in which an error was raised, and of their callers, as far as they have ended.

    They refer to logits and to the error itself, so without this they are kept until a garbage collection.
    """
    traceback = error.__traceback__
    while traceback is not None:
        frame: FrameType | None = traceback.tb_frame
        while frame is not None and not frame.f_code.co_flags & inspect.CO_GENERATOR:  # a generator may go on
            try:
                frame.clear()
            except RuntimeError:  # it has not ended
                break
            frame = frame.f_back
        traceback = traceback.tb_next


class Handle:
    """A request as its caller sees it.

    Iterate over it for the Steps, each as soon as it is known, with `for` or `async for`. `result()` and `await` give
    the Generation. If the request fails, all of them raise its error.
    """

    def __init__(self, request: Progress):
        self._request = request

    def __repr__(self) -> str:
        state = self._request.finish or ("failed" if self._request.error else "in progress")
        return f"Handle(id={self.id}, {state}, {len(self._request.steps)} steps)"

    @property
    def id(self) -> int:
        """The number of the request; later requests of an engine have higher ones."""
        return self._request.number

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return self._request.prompt_tokens

    @property
    def seed(self) -> int | None:
        """The seed of the draws; None: greedy, and none was given."""
        return self._request.seed

    @property
    def done(self) -> bool:
        """Whether the text has ended or failed."""
        return self._request.done

    @property
    def created(self) -> float:
        """When the request was made, in seconds of `time.perf_counter`."""
        return self._request.created

    @property
    def times(self) -> list[float]:
        """Seconds from `created` to each Step so far."""
        return self._request.times

    @property
    def ttft(self) -> float | None:
        """Seconds from `created` to the first Step; None: there is none yet."""
        moments = self._request.moments
        return moments[0] - self._request.created if moments else None

    @property
    def totals(self) -> Totals:
        """Sums over the Steps so far."""
        return Totals.of(self._request.steps)

    @property
    def steps(self) -> list[Step]:
        """The Steps so far."""
        return list(self._request.steps)

    @property
    def finish_reason(self) -> str | None:
        """Why the text has ended; None if it has not, or has failed."""
        return self._request.finish

    def cancel(self) -> None:
        """End the text at the next cycle, with the finish reason "cancelled"; a text that has ended stays as it is."""
        self._request.cancel()

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the end of the text; a TimeoutError if that takes longer than `timeout` seconds."""
        request = self._request
        with request.changed:
            if not request.changed.wait_for(lambda: request.done, timeout):
                raise TimeoutError(f"request {self.id} has not ended within {timeout} seconds")
        return request.generation()

    def add_done_callback(self, call: Callable[[Handle], Any]) -> None:
        """Call this with the handle when the text has ended, in the thread that generates; at once if it has."""
        self._request.call_at_end(lambda: call(self))

    def __iter__(self) -> Iterator[Step]:
        request, known = self._request, 0
        while True:
            fresh = request.wait_for_more(known)
            if not fresh:
                break
            yield from fresh
            known += len(fresh)
        if request.error is not None:
            raise request.error

    async def __aiter__(self) -> AsyncIterator[Step]:
        async for steps in self.arrivals():
            for step in steps:
                yield step

    async def arrivals(self, pause: Callable[[], float] = lambda: 0.0) -> AsyncIterator[list[Step]]:
        """The Steps in lists: each has all that came since the last one. There are `pause()` seconds between two lists,
        unless the text ends.

        With many requests, following every single Step costs more time than generating it.
        """
        request, known, loop, awake = self._request, 0, asyncio.get_running_loop(), asyncio.Event()
        request.call_at_end(lambda: call_in(loop, awake.set))
        while True:
            if len(request.steps) == known:
                await self._change(known)
            fresh = request.steps[known:]
            if not fresh:
                break
            yield fresh
            known += len(fresh)
            if (seconds := pause()) > 0:
                timer = loop.call_later(seconds, awake.set)
                await awake.wait()
                timer.cancel()
                if not request.done:  # the end sets it for good
                    awake.clear()
        if request.error is not None:
            raise request.error

    def __await__(self) -> Generator[Any, None, Generation]:
        """Cancelling the task that waits cancels the request."""
        return self._finished().__await__()

    async def _finished(self) -> Generation:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self._request.call_at_end(lambda: call_in(loop, ended.set))
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._request.generation()

    async def _change(self, known_steps: int) -> None:
        """Wait until there are more Steps than this, or the text has ended."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        if self._request.call_on_change(lambda: call_in(loop, changed.set), known_steps):
            await changed.wait()
