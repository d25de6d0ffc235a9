"""Connects an engine with the HTTP processes of its server."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from windfall.serve.admission import Admission
from windfall.serve.backend import Answers
from windfall.serve.workers.channel import Channel
from windfall.serve.workers.link import Link, sent_counters
from windfall.serve.workers.messages import (
    Ask,
    Cancel,
    Count,
    Counted,
    Hello,
    Probe,
    Ready,
    RemoteModel,
    Submit,
    Told,
)

COUNT_SECONDS = 1.0  # that an HTTP process has to tell its answers; then the last known ones are taken


@dataclass(eq=False)
class Member:
    """An HTTP process, as the hub knows it."""

    link: Link
    process: int  # its id
    when_ready: Callable[[], None]
    when_closed: Callable[[], None]
    answers: Answers = field(default_factory=Answers)  # that it has told


@dataclass
class Question:
    """A process waits for the figures, which need the answers of all others."""

    asked: Ask
    by: Member
    waiting: set[int]  # the numbers of the processes that have not told theirs, see `Hub._members`
    until: float


class Hub:
    """Handles the messages of all HTTP processes, in the thread that calls `step`."""

    def __init__(self, admission: Admission):
        self.admission = admission
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for each in (self._woken, self._waker):
            each.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._members: dict[int, Member] = {}  # by the file number of the channel
        self._calls: deque[Callable[[], None]] = deque()
        self._past_answers = Answers()  # of processes that have ended
        self._questions: dict[int, Question] = {}
        self._asked = 0
        admission.engine.call_after_rounds(self._send_steps)

    def hello(self, log_format: str, drain_seconds: int) -> Hello:
        """The first message to an HTTP process."""
        own = self.admission
        names = tuple(own.policies)
        model = RemoteModel.of(own.model)
        return Hello(own.settings, model, own.about, own.max_requests, names, log_format, drain_seconds)

    def add(
        self,
        connection: socket.socket,
        hello: Hello,
        process: int,
        when_ready: Callable[[], None] = lambda: None,
        when_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Take in an HTTP process with this id. The calls are made when it is ready, and when it has ended."""
        channel = Channel(connection)
        link = Link(channel, self.admission, self.wake)
        self._members[channel.fileno()] = Member(link, process, when_ready, when_closed)
        self._selector.register(channel, selectors.EVENT_READ)
        link.send(hello)

    def call(self, call: Callable[[], None]) -> None:
        """Let the hub's thread make this call soon; any thread may ask."""
        self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        """Let `step` return; any thread or signal handler may ask."""
        with suppress(OSError):  # it was woken often enough, or is closed
            self._waker.send(b"\0")

    def step(self, seconds: float) -> None:
        """Wait for messages, for this time at most, and handle them."""
        if self._questions:
            seconds = min(seconds, COUNT_SECONDS)
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._woken:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._watch_writing()
            elif key.fd in self._members:
                if events & selectors.EVENT_WRITE and self._members[key.fd].link.channel.flush():
                    self._selector.modify(key.fileobj, selectors.EVENT_READ)
                if events & selectors.EVENT_READ:
                    self._receive(key.fd)
        while self._calls:
            self._calls.popleft()()
        self._answer_questions()

    def close(self) -> None:
        """Close all connections."""
        for number in list(self._members):
            self._remove(number)
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _send_steps(self) -> None:
        for member in list(self._members.values()):
            member.link.send_steps()

    def _watch_writing(self) -> None:
        for member in self._members.values():
            if member.link.channel.full:
                self._selector.modify(member.link.channel, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _receive(self, number: int) -> None:
        member = self._members[number]
        try:
            messages = member.link.channel.receive()
        except EOFError:
            self._remove(number)
            return
        for message in messages:
            self._handle(member, message)

    def _remove(self, number: int) -> None:
        member = self._members.pop(number)
        self._past_answers += member.answers
        self._selector.unregister(member.link.channel)
        member.link.close()
        for question in self._questions.values():
            question.waiting.discard(number)
        member.when_closed()

    def _handle(self, member: Member, message: Any) -> None:
        match message:
            case Submit():
                member.link.submit(message)
            case Cancel():
                member.link.cancel(message)
            case Ask():
                self._ask(member, message)
            case Counted():
                member.answers = message.answers
                if (question := self._questions.get(message.number)) is not None:
                    question.waiting.discard(member.link.channel.fileno())
            case Probe():
                member.link.probe(message)
            case Ready():
                member.when_ready()

    def _ask(self, member: Member, asked: Ask) -> None:
        """Answer with the figures, at once or when all processes have told their answers."""
        if asked.answers is None:
            self._tell(member, asked)
            return
        member.answers = asked.answers
        self._asked += 1
        others = {number: other for number, other in self._members.items() if other is not member}
        until = time.monotonic() + COUNT_SECONDS
        self._questions[self._asked] = Question(asked, member, set(others), until)
        for other in others.values():
            other.link.send(Count(self._asked))

    def _answer_questions(self) -> None:
        for number, question in list(self._questions.items()):
            if not question.waiting or time.monotonic() >= question.until:
                del self._questions[number]
                self._tell(question.by, question.asked)

    def _tell(self, member: Member, asked: Ask) -> None:
        own, members, answers = self.admission, self._members.values(), Answers()
        if asked.answers is not None:
            answers = sum((each.answers for each in members), self._past_answers)
        figures = own.figures
        told = replace(
            figures,
            counters=sent_counters(figures.counters),
            answers=answers,
            processes=(os.getpid(), *(each.process for each in members)),
        )
        member.link.send(Told(asked.number, told, own.closed, None if own.lost is None else str(own.lost)))
