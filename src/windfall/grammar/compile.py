"""Compiles constraints for a target, each once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cached_property
from importlib.util import find_spec
from typing import Any
from weakref import WeakValueDictionary

from windfall.core.constraint import BACKENDS, Constraint
from windfall.core.errors import InputError
from windfall.grammar.base import Backend, Grammar
from windfall.grammar.vocabulary import Vocabulary, read_vocabulary

MAX_KEPT = 64  # compiled grammars
INSTALL = 'pip install "windfall[grammar]"'


class Compiler:
    """The grammar libraries with one vocabulary. They are imported on first use."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._backends: dict[str, Backend] = {}

    def prepare(self) -> None:
        """Load the library that is tried first."""
        self._backend(next(filter(installed, BACKENDS)))

    def compile(self, constraint: Constraint) -> Grammar:
        """By the first installed library that supports all of the constraint."""
        names, problems = check_installed(constraint), list[str]()
        for name in names:
            backend = self._backend(name)
            if ignored := backend.unsupported(constraint):
                problems.append(f"{name} does not support {ignored}")
                continue
            try:
                return backend.compile(constraint)
            except InputError as error:
                problems.append(f"{name}: {str(error).partition(': ')[2]}")
        others = [name for name in BACKENDS if name not in names]
        if others and not constraint.backend:
            problems.append(f"{others[0]} may: {INSTALL}")
        raise InputError(f"the {constraint.name} cannot be used: {'; '.join(problems)}")

    def _backend(self, name: str) -> Backend:
        if name not in self._backends:
            self._backends[name] = make_backend(name, self._vocabulary)
        return self._backends[name]


class Grammars:
    """The compiled grammars of one tokenizer: those that are in use, and the latest others. Any thread may ask."""

    def __init__(self, tokenizer: Any, vocabulary_size: int, eos: tuple[int, ...]):
        self._tokenizer, self._size, self._eos = tokenizer, vocabulary_size, eos
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()  # the latest
        self._used: WeakValueDictionary[Constraint, Grammar] = WeakValueDictionary()  # all that anything refers to
        self._lock = threading.Lock()  # of these two
        self._compiling = threading.Lock()

    def find(self, constraint: Constraint) -> Grammar | None:
        """The grammar of a constraint, if it is compiled."""
        with self._lock:
            grammar = self._used.get(constraint)
            if grammar is not None:
                self._keep(constraint, grammar)
            return grammar

    def compile(self, constraint: Constraint) -> Grammar:
        """The grammar of a constraint; raises an InputError of one line if there is none."""
        if (grammar := self.find(constraint)) is not None:
            return grammar
        with self._compiling:
            if (grammar := self.find(constraint)) is None:
                check_installed(constraint)
                grammar = self._compiler.compile(constraint)
                with self._lock:
                    self._keep(constraint, grammar)
        return grammar

    def _keep(self, constraint: Constraint, grammar: Grammar) -> None:
        self._kept[constraint] = self._used[constraint] = grammar
        self._kept.move_to_end(constraint)
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    @cached_property
    def _compiler(self) -> Compiler:
        return Compiler(self.vocabulary)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The texts of the tokens."""
        return read_vocabulary(self._tokenizer, self._size, self._eos)


def check_installed(constraint: Constraint) -> list[str]:
    """The installed libraries that may compile a constraint; raises an InputError if there are none."""
    wanted = BACKENDS if constraint.backend is None else (constraint.backend,)
    if not (names := [name for name in wanted if installed(name)]):
        raise InputError(f"structured output needs {' or '.join(wanted)}: {INSTALL}")
    return names


def installed(name: str) -> bool:
    """Whether a library can be imported."""
    return find_spec(name) is not None


def make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """A grammar library with this vocabulary. The libraries are imported on first use."""
    if name == "xgrammar":
        from windfall.grammar.xgrammar import XGrammarBackend

        return XGrammarBackend(vocabulary)
    from windfall.grammar.llguidance import LLGuidanceBackend

    return LLGuidanceBackend(vocabulary)
