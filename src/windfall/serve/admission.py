"""Admission: submits texts to an engine in this process, and refuses them if too many wait."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from windfall import registry
from windfall.core.constraint import Constraint
from windfall.core.errors import RoomError
from windfall.engine.engine import Engine
from windfall.engine.prompts import ModelInfo
from windfall.engine.request import Handle, Sink
from windfall.grammar.base import Grammar
from windfall.serve.backend import FOR_TEMPLATES, PROBE, Answers, Budget, Encoded, EngineAbout, Figures, Job, size
from windfall.serve.errors import shutting_down
from windfall.serve.grammars import LimitedGrammars
from windfall.serve.places import Places
from windfall.serve.policies import offered
from windfall.serve.prompt_threads import PromptThreads
from windfall.serve.settings import Settings


class Admission:
    """The backend of an application in the process of its engine.

    Prompts are tokenized in other threads, and before that, grammars are compiled.
    """

    def __init__(self, engine: Engine, settings: Settings):
        self.engine, self.settings = engine, settings
        self.model: ModelInfo = engine.target
        self.encoder = engine.prompts
        self.about = about(engine)
        self.answers: Answers = Counter()
        self._policies = offered(settings.request_policies)
        self.places = Places(engine.max_requests, settings.max_queue)
        self.prompts = PromptThreads()
        self.grammars = LimitedGrammars(engine.grammars, settings)

    @property
    def max_requests(self) -> int:
        return self.engine.max_requests

    @property
    def policies(self) -> Collection[str]:
        return self._policies

    @property
    def closed(self) -> bool:
        return self.engine.closed

    @property
    def lost(self) -> Exception | None:
        return self.engine.lost

    @property
    def streams(self) -> int:
        return self.engine.running

    @property
    def figures(self) -> Figures:
        engine, used = self.engine, self.engine.counters.use
        return Figures(
            counters=engine.counters,
            running=engine.running,
            waiting=engine.waiting,
            expected=self.places.expected,
            unfinished=self.places.taken,
            memory=used.memory,
            budget=None if used.budget is None else Budget(used.budget.passes, used.budget.rows),
            answers=self.answers,
            processes=(os.getpid(),),
        )

    async def refresh(self, answers: bool = False) -> None:
        """The figures are always the present ones."""

    async def probe(self) -> None:
        await (await asyncio.to_thread(self.engine.submit, [0], **PROBE))

    async def submit(self, jobs: list[Job]) -> list[Handle]:
        if self.engine.closed:
            raise shutting_down()
        self.places.enter(len(jobs))
        try:
            ready = await self.grammars.compile(constraints(jobs))
            submitted = self.prompts.submit(size(jobs), self.submit_entered, jobs, ready)
        except BaseException:
            self.places.leave(len(jobs))
            raise
        try:
            return await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            if submitted.cancel():
                self.places.leave(len(jobs))
            else:
                submitted.add_done_callback(_cancel)
            raise

    def submit_entered(
        self, jobs: list[Job], grammars: list[Grammar], sinks: Sequence[Sink] | None = None
    ) -> list[Handle]:
        """Submit texts that have entered. Their `grammars` are compiled, and kept until the engine has them.

        `sinks` take the Steps of the texts, in their order.
        """
        handles: list[Handle] = []
        encoded = Encoded(self.encoder)
        try:
            for place, job in enumerate(jobs):
                handles.append(self._submit_one(job, encoded.of(job), None if sinks is None else sinks[place]))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        finally:
            self.places.fill(handles, len(jobs))
        return handles

    def _submit_one(self, job: Job, prompt: list[int], sink: Sink | None) -> Handle:
        policy = None if job.policy is None else self._policies[job.policy]
        sampling = {name: value for name, value in job.sampling.items() if name not in FOR_TEMPLATES}
        how: dict[str, Any] = {"deadline": self.settings.request_timeout, "policy": policy, "sink": sink}
        try:
            return self.engine.submit_ids(prompt, **how, **sampling)
        except RoomError as error:
            if not (job.shortens and error.room):
                raise
            shorter = {**sampling, "max_new_tokens": error.room}
        return self.engine.submit_ids(prompt, **how, **shorter)


def constraints(jobs: Iterable[Job]) -> list[Constraint]:
    """The constraints of these texts, each once."""
    return list(dict.fromkeys(job.sampling["constraint"] for job in jobs if job.sampling.get("constraint") is not None))


def about(engine: Engine) -> EngineAbout:
    """The engine in words."""
    return EngineAbout(
        device=str(engine.target.device),
        dtype=str(engine.target.decoder.dtype).removeprefix("torch."),
        drafter=_known_name(engine.drafter, registry.DRAFTERS),
        policy=_known_name(engine.policy, registry.POLICIES),
    )


def _known_name(made: Any, known: Mapping[str, str]) -> str:
    """The name by which the command line knows this policy or drafter; the name of its class, if it is not built in."""
    cls = type(made)
    return {path: name for name, path in known.items()}.get(f"{cls.__module__}:{cls.__name__}", cls.__name__)


def _cancel(submitted: Future[list[Handle]]) -> None:
    with suppress(Exception):
        for handle in submitted.result():
            handle.cancel()
