"""The engine's side of the connection to one HTTP process."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from windfall.core.step import Step
from windfall.engine.counters import Counters
from windfall.engine.handle import Handle
from windfall.engine.use import Use
from windfall.grammar.base import Grammar
from windfall.serve.admission import Admission, constraints
from windfall.serve.backend import PROBE, Job
from windfall.serve.errors import shutting_down
from windfall.serve.workers.channel import Channel
from windfall.serve.workers.messages import (
    Accepted,
    Cancel,
    Details,
    Ended,
    Probe,
    Probed,
    Problem,
    Refused,
    Round,
    SentStep,
    Submit,
)


class SentText:
    """A text whose Steps are sent to an HTTP process. It is the sink of the request."""

    def __init__(self, link: Link, number: int, job: Job):
        self.number = number
        self._link, self._whole_steps = link, job.whole_steps
        self._add = link.steps.append  # bound once: this is called for every text in every round
        wanted = (job.sampling.get("logprobs"), job.sampling.get("prompt_logprobs"))
        self._detailed = job.whole_steps or wanted != (None, None)
        self._handle: Handle | None = None
        self._cancelled = False

    def put(self, step: Step, now: float) -> None:
        if not self._detailed and step.finish is None:
            self._add((self.number, step.tokens, step.counts, None))
            return
        try:
            self._add((self.number, step.tokens, step.counts, self._details(step)))
        except Exception as error:  # other requests must go on
            self.cancel()
            self.end(None, error)
        if step.finish is not None:
            self._forget()

    def _details(self, step: Step) -> Details:
        cycle = (step.node_arrays, step.seconds, step.whole_tree) if self._whole_steps else None
        return Details(step.finish, step.logprobs, step.prompt_logprobs, cycle)

    def end(self, reason: str | None, error: Exception | None) -> None:
        self._link.send(Ended(self.number, reason, None if error is None else Problem.of(error)))
        self._forget()

    def _forget(self) -> None:
        self._link.forget(self.number)
        self._handle = None  # which refers to this

    def follow(self, handle: Handle) -> None:
        """The text was submitted."""
        if not handle.done:
            self._handle = handle
        if handle.done:  # in the meantime
            self._handle = None
        elif self._cancelled:
            handle.cancel()

    def cancel(self) -> None:
        """End the text, as soon as it is submitted."""
        self._cancelled = True
        if self._handle is not None:
            self._handle.cancel()


class Link:
    """Submits what an HTTP process asks for, and sends it the Steps.

    The hub's thread handles messages. The thread that generates adds Steps and sends them after each round.
    """

    def __init__(self, channel: Channel, admission: Admission, wake: Callable[[], None]):
        """`wake` lets the hub's thread flush the channel."""
        self.channel, self._admission, self._wake = channel, admission, wake
        self._texts: dict[int, SentText] = {}  # that have not ended, by number
        self.steps: deque[SentStep] = deque()  # of the present round; the thread that generates adds them
        self._sending = threading.Lock()  # Steps are sent in their order

    def send(self, message: Any) -> None:
        """Send a message after the Steps so far; any thread may."""
        self.send_steps()
        if not self.channel.send(message):
            self._wake()

    def send_steps(self) -> None:
        """Send the Steps of the round."""
        if not self.steps:
            return
        with self._sending:
            steps = [self.steps.popleft() for _ in range(len(self.steps))]
            sent = not steps or self.channel.send(Round(time.perf_counter(), steps))
        if not sent:
            self._wake()

    def forget(self, number: int) -> None:
        self._texts.pop(number, None)

    def cancel(self, asked: Cancel) -> None:
        if (text := self._texts.get(asked.text)) is not None:
            text.cancel()

    def close(self) -> None:
        """Cancel all texts: the process has ended."""
        self.channel.close()
        for text in list(self._texts.values()):
            text.cancel()

    def submit(self, asked: Submit) -> None:
        """Submit texts, after their grammars are compiled, which happens in other threads."""
        admission, needed = self._admission, constraints(asked.jobs)
        try:
            if admission.closed:
                raise shutting_down()
            known = admission.grammars.find(needed)
            admission.places.enter(len(asked.jobs))
        except Exception as error:
            self.send(Refused(asked.first, len(asked.jobs), Problem.of(error)))
            return
        texts = [SentText(self, asked.first + place, job) for place, job in enumerate(asked.jobs)]
        self._texts.update({text.number: text for text in texts})
        if known is not None:
            self._submit(asked, texts, known)
        else:
            admission.grammars.start(needed).add_done_callback(partial(self._submit_compiled, asked, texts))

    def _submit_compiled(self, asked: Submit, texts: list[SentText], compiled: Future[list[Grammar]]) -> None:
        if (error := compiled.exception()) is not None:
            self._admission.places.leave(len(texts))
            self._refuse(asked, texts, error)
        else:
            self._submit(asked, texts, compiled.result())

    def _submit(self, asked: Submit, texts: list[SentText], grammars: list[Grammar]) -> None:
        try:
            handles = self._admission.submit_entered(asked.jobs, grammars, texts)
        except Exception as error:
            self._refuse(asked, texts, error)
            return
        for text, handle in zip(texts, handles, strict=True):
            text.follow(handle)
        self.send(Accepted(asked.first))

    def _refuse(self, asked: Submit, texts: list[SentText], error: BaseException) -> None:
        for text in texts:
            self.forget(text.number)
        self.send(Refused(asked.first, len(asked.jobs), Problem.of(error)))

    def probe(self, asked: Probe) -> None:
        """Generate a text of one token."""
        try:
            handle = self._admission.engine.submit([0], **PROBE)
        except Exception as error:
            self.send(Probed(asked.number, Problem.of(error)))
        else:
            handle.add_done_callback(partial(self._end_probe, asked))

    def _end_probe(self, asked: Probe, handle: Handle) -> None:
        try:
            handle.result()
        except Exception as error:
            self.send(Probed(asked.number, Problem.of(error)))
        else:
            self.send(Probed(asked.number, None))


def sent_counters(counters: Counters) -> Counters:
    """Counters without the values that only the process of the engine can read."""
    made = copy.copy(counters)
    made.use = Use()
    return made
