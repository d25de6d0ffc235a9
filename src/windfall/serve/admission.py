"""Admission: submits texts to the engine, and refuses them if too many wait."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from windfall.core.errors import RoomError
from windfall.core.wording import counted
from windfall.engine.engine import Engine, Prompt, size_of
from windfall.engine.request import Handle
from windfall.grammar.base import Grammar
from windfall.policies.base import TreePolicy
from windfall.serve.errors import ApiError, shutting_down, too_busy
from windfall.serve.grammars import LimitedGrammars
from windfall.serve.policies import offered
from windfall.serve.prompt_threads import PromptThreads
from windfall.serve.settings import Settings


@dataclass(frozen=True)
class Job:
    """A text to be generated."""

    prompt: Prompt
    raw: bool  # whether the chat template is left out
    sampling: dict[str, Any]
    shortens: bool = False  # whether a text with fewer new tokens will do, if the memory is too small
    policy: TreePolicy | None = None  # None: the engine's

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """What the chat template shows to the model besides the messages."""
        return self.sampling.get("tools")

    @property
    def template_variables(self) -> dict[str, Any] | None:
        return self.sampling.get("chat_template_kwargs")

    @property
    def constrained(self) -> bool:
        return self.sampling.get("constraint") is not None


class Admission:
    """Counts the texts that run or wait. Prompts are tokenized in other threads, and before that, grammars are
    compiled."""

    def __init__(self, engine: Engine, settings: Settings):
        self.engine, self.settings = engine, settings
        self.capacity = engine.max_requests + settings.max_queue
        self.policies = offered(settings.request_policies)
        self._expected = 0  # texts that are about to be submitted
        self._handles: list[Handle] = []
        self._lock = threading.Lock()
        self.prompts = PromptThreads()
        self._grammars = LimitedGrammars(engine.grammars, settings)

    @property
    def unfinished(self) -> int:
        """Texts that run or wait."""
        with self._lock:
            return self._count()

    @property
    def expected(self) -> int:
        """Texts that are not submitted to the engine yet, because their prompts are being tokenized."""
        return self._expected

    @property
    def running(self) -> int:
        """Texts that run, if all fit into the memory."""
        return min(self.unfinished, self.engine.max_requests)

    @property
    def waiting(self) -> int:
        """Texts that wait for a place."""
        return max(self.unfinished - self.engine.max_requests, 0)

    async def submit(self, jobs: list[Job]) -> list[Handle]:
        """Submit all of these texts, or none if one is refused. If the caller is cancelled, so are the texts."""
        if self.engine.closed:
            raise shutting_down()
        self._enter(len(jobs))
        try:
            ready = await self._grammars.compile({job.sampling["constraint"]: None for job in jobs if job.constrained})
            submitted = self.prompts.submit(_size(jobs), self._submit, jobs, ready)
        except BaseException:
            self._add([], len(jobs))
            raise
        try:
            return await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            if submitted.cancel():
                self._add([], len(jobs))
            else:
                submitted.add_done_callback(_cancel)
            raise

    def _submit(self, jobs: list[Job], _: list[Grammar]) -> list[Handle]:
        """Submit texts whose grammars are compiled, and kept until the engine has them."""
        handles: list[Handle] = []
        encoded: dict[int, list[int]] = {}  # by prompt: several texts may have the same one
        try:
            for job in jobs:
                if id(job.prompt) not in encoded:
                    how = (job.raw, job.tools, job.template_variables)
                    encoded[id(job.prompt)] = self.engine.encode(job.prompt, *how)
                handles.append(self._submit_one(job, encoded[id(job.prompt)]))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        finally:
            self._add(handles, len(jobs))
        return handles

    def _submit_one(self, job: Job, prompt: list[int]) -> Handle:
        how: dict[str, Any] = {"deadline": self.settings.request_timeout, "policy": job.policy}
        try:
            return self.engine.submit(prompt, **how, **job.sampling)
        except RoomError as error:
            if not (job.shortens and error.room):
                raise
            shorter = {**job.sampling, "max_new_tokens": error.room}
        return self.engine.submit(prompt, **how, **shorter)

    def _enter(self, texts: int) -> None:
        if texts > self.capacity:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"the request asks for {texts} texts at once; this server takes at most {self.capacity}",
            )
        with self._lock:
            if self._count() + texts <= self.capacity:
                self._expected += texts
                return
        raise too_busy(f"the queue is full: {counted(self.running, 'text')} in progress, {self.waiting} waiting")

    def _add(self, handles: list[Handle], expected: int) -> None:
        """Count these handles in the place of the texts that were expected."""
        with self._lock:
            self._expected -= expected
            self._handles += handles

    def _count(self) -> int:
        self._handles = [handle for handle in self._handles if not handle.done]
        return self._expected + len(self._handles)


def _size(jobs: list[Job]) -> int:
    """The characters to be tokenized."""
    return sum(size_of([job.prompt, job.tools]) for job in {id(job.prompt): job for job in jobs}.values())


def _cancel(submitted: Future[list[Handle]]) -> None:
    with suppress(Exception):
        for handle in submitted.result():
            handle.cancel()
