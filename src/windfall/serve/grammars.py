"""Compiles the constraints of clients, with limits, while other requests go on."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import Empty, LifoQueue
from typing import TYPE_CHECKING

from windfall.core.constraint import Constraint
from windfall.core.errors import InputError
from windfall.grammar.base import Grammar
from windfall.grammar.compile import Grammars, check_installed
from windfall.grammar.trial import Trial, needs_trial
from windfall.serve.errors import too_busy
from windfall.serve.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_TRIALS = 2  # processes
MAX_WAITING = 32  # threads that wait for them


class LimitedGrammars:
    """The compiled grammars of an engine. Constraints that could take long have to pass a trial in another process."""

    def __init__(self, grammars: Grammars, settings: Settings):
        self._grammars, self._seconds = grammars, settings.grammar_timeout
        self._max_characters = settings.max_grammar_chars
        self._threads = ThreadPoolExecutor(MAX_WAITING, "windfall-grammar")
        self._idle: LifoQueue[Trial | None] = LifoQueue()  # None: one that was never needed
        for _ in range(MAX_TRIALS):
            self._idle.put(None)

    async def compile(self, constraints: list[Constraint]) -> list[Grammar]:
        """The grammars of these constraints, which the engine finds as long as the caller keeps them."""
        known = self.find(constraints)
        return await asyncio.wrap_future(self.start(constraints)) if known is None else known

    def find(self, constraints: list[Constraint]) -> list[Grammar] | None:
        """The grammars of these constraints, if all are compiled. One that is too long is refused."""
        for constraint in constraints:
            if len(constraint.source) > self._max_characters:
                size = f"{self._max_characters} characters at most here, not {len(constraint.source)}"
                raise InputError(f"a {constraint.name} has {size}")
        known = [grammar for grammar in map(self._grammars.find, constraints) if grammar is not None]
        return known if len(known) == len(constraints) else None

    def start(self, constraints: list[Constraint]) -> Future[list[Grammar]]:
        """Compile these constraints in another thread."""
        return self._threads.submit(lambda: [self._one(constraint) for constraint in constraints])

    def _one(self, constraint: Constraint) -> Grammar:
        if (known := self._grammars.find(constraint)) is not None:
            return known
        check_installed(constraint)
        return self._try(constraint) if needs_trial(constraint) else self._grammars.compile(constraint)

    def _try(self, constraint: Constraint) -> Grammar:
        with self._trial() as trial:
            if (known := self._grammars.find(constraint)) is None:
                trial.check(constraint, self._seconds)
        return known or self._grammars.compile(constraint)

    @contextmanager
    def _trial(self) -> Iterator[Trial]:
        try:
            trial = self._idle.get(timeout=self._seconds)
        except Empty:
            raise too_busy("too many other grammars are being compiled") from None
        try:
            trial = trial or Trial(self._grammars.vocabulary)
            yield trial
        finally:
            self._idle.put(trial)
