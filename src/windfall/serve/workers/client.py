"""The backend of an application whose engine is in another process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from windfall.engine.handle import CANCELLED, Handle
from windfall.engine.prompts import ModelInfo, PromptEncoder
from windfall.serve.backend import FOR_TEMPLATES, Answers, Encoded, Figures, Job, size
from windfall.serve.errors import shutting_down
from windfall.serve.places import Places
from windfall.serve.prompt_threads import PromptThreads
from windfall.serve.workers.channel import Channel
from windfall.serve.workers.messages import (
    Accepted,
    Ask,
    Cancel,
    Count,
    Counted,
    Ended,
    Hello,
    Probe,
    Probed,
    Ready,
    Refused,
    Round,
    SentStep,
    Submit,
    Told,
)
from windfall.serve.workers.remote_text import RemoteText


class RemoteEngine:
    """Submits texts to the engine of another process, which decides whether they are accepted.

    It belongs to one event loop, which must `attach` it.
    """

    def __init__(self, channel: Channel, hello: Hello):
        self._channel, self._hello = channel, hello
        self.settings, self.about = hello.settings, hello.about
        self.model: ModelInfo = hello.model
        self.encoder, self.prompts = PromptEncoder(hello.model), PromptThreads()
        self.answers = Answers()
        self._places = Places(hello.max_requests, hello.settings.max_queue)  # of all processes, taken by this one
        self._numbers = itertools.count()
        self._texts: dict[int, RemoteText] = {}  # that have not ended
        self._replies: dict[int, asyncio.Future[Any]] = {}  # that are awaited
        self._figures: Figures | None = None
        self.closed = False
        self.lost: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def policies(self) -> Collection[str]:
        return self._hello.policies

    @property
    def max_requests(self) -> int:
        return self._hello.max_requests

    @property
    def streams(self) -> int:
        return len(self._texts)

    @property
    def figures(self) -> Figures:
        assert self._figures is not None, "they have to be refreshed first"
        return self._figures

    def attach(self, when_closed: Callable[[], None]) -> None:
        """Receive messages in this event loop. `when_closed` is called when the other process has ended."""
        self._loop, self._when_closed = asyncio.get_running_loop(), when_closed
        self._loop.add_reader(self._channel.fileno(), self._receive)
        self._send(Ready())

    async def refresh(self, answers: bool = False) -> None:
        number = next(self._numbers)
        told: Told = await self._reply(number, Ask(number, self.answers if answers else None))
        self._figures, self.closed, self.lost = told.figures, told.closed, told.lost

    async def probe(self) -> None:
        number = next(self._numbers)
        probed: Probed = await self._reply(number, Probe(number))
        if probed.problem is not None:
            raise probed.problem.error

    async def submit(self, jobs: list[Job]) -> list[Handle]:
        if self.closed:
            raise shutting_down()
        self._places.enter(len(jobs))
        handles = list[Handle]()
        try:
            encoded = await self.prompts.run(size(jobs), self._encode, jobs)
            handles = await self._submit(encoded)
        finally:
            self._places.fill(handles, len(jobs))
        return handles

    def _encode(self, jobs: list[Job]) -> list[Job]:
        """These texts, with token ids as prompts."""
        encoded, made = Encoded(self.encoder), list[Job]()
        for job in jobs:
            sampling = {name: value for name, value in job.sampling.items() if name not in FOR_TEMPLATES}
            made.append(replace(job, prompt=encoded.of(job), encoded=True, sampling=sampling))
        return made

    async def _submit(self, jobs: list[Job]) -> list[Handle]:
        numbers = [next(self._numbers) for _ in jobs]
        first = numbers[0]
        texts = [
            RemoteText(number, job, self.model.tokenizer, self._cancel)
            for number, job in zip(numbers, jobs, strict=True)
        ]
        self._texts.update(zip(numbers, texts, strict=True))
        try:
            answer: Accepted | Refused = await self._reply(first, Submit(first, jobs))
        except BaseException:
            for text in texts:
                text.cancel()
            raise
        if isinstance(answer, Refused):
            raise answer.problem.error
        return [Handle(text) for text in texts]

    def _cancel(self, number: int) -> None:
        if number in self._texts:
            self._send(Cancel(number))

    async def _reply(self, number: int, message: Any) -> Any:
        """What the other process answers."""
        assert self._loop is not None, "the event loop has to attach this first"
        if self.closed and self._channel.fileno() < 0:
            raise shutting_down()
        self._replies[number] = reply = self._loop.create_future()
        try:
            self._send(message)
            return await reply
        finally:
            del self._replies[number]

    def _send(self, message: Any) -> None:
        if not self._channel.send(message) and self._loop is not None:
            self._loop.add_writer(self._channel.fileno(), self._flush)

    def _flush(self) -> None:
        if self._channel.flush() and self._loop is not None:
            self._loop.remove_writer(self._channel.fileno())

    def _receive(self) -> None:
        try:
            messages = self._channel.receive()
        except EOFError:
            self._end()
            return
        for message in messages:
            self._handle(message)

    def _handle(self, message: Any) -> None:
        match message:
            case Round():
                for step in message.steps:
                    self._receive_step(step, message.now)
            case Ended():
                if (text := self._texts.pop(message.text, None)) is not None:
                    if message.problem is not None:
                        text.fail(message.problem.error)
                    else:
                        text.end(message.reason or CANCELLED)
            case Accepted():
                self._answer(message.first, message)
            case Refused():
                for number in range(message.first, message.first + message.texts):
                    self._texts.pop(number, None)
                self._answer(message.first, message)
            case Told() | Probed():
                self._answer(message.number, message)
            case Count():
                self._send(Counted(message.number, self.answers))

    def _receive_step(self, step: SentStep, now: float) -> None:
        number, tokens, counts, details = step
        if (text := self._texts.get(number)) is None:
            return
        try:
            text.receive(tokens, counts, details, now)
        except Exception as error:  # of the tokenizer: other texts must go on
            self._cancel(number)
            text.fail(error)
        if text.done:
            del self._texts[number]

    def _answer(self, number: int, message: Any) -> None:
        if (reply := self._replies.get(number)) is not None and not reply.done():
            reply.set_result(message)

    def _end(self) -> None:
        """The process of the engine has ended: so do all texts."""
        assert self._loop is not None
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        self.closed = True
        for text in self._texts.values():
            text.end(CANCELLED)
        self._texts.clear()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(shutting_down())
        self._when_closed()
