"""The interface of a grammar library. A matcher knows text only: the Guide adds the tokens that end a text."""

from __future__ import annotations

from typing import Protocol

from windfall.core.constraint import Constraint
from windfall.core.tree import Flags
from windfall.grammar.vocabulary import Vocabulary


class Matcher(Protocol):
    """The state of one text in a grammar."""

    def advance(self, token: int) -> None:
        """Add a legal token."""

    def undo(self, tokens: int) -> None:
        """Remove the last tokens."""

    def legal(self, token: int) -> bool:
        """Whether a token with text may come next; always what `mask` says."""

    def mask(self) -> Flags:
        """Which tokens may come next [size of the vocabulary]."""

    @property
    def may_end(self) -> bool:
        """Whether the text is complete; more may be allowed to follow."""


class Grammar(Protocol):
    """A compiled grammar, for any number of texts."""

    vocabulary: Vocabulary

    def matcher(self) -> Matcher:
        """The state of a new text."""


class Backend(Protocol):
    """A grammar library, prepared for a vocabulary."""

    def unsupported(self, constraint: Constraint) -> str:
        """What the library would ignore without notice; empty if nothing."""

    def compile(self, constraint: Constraint) -> Grammar:
        """Raises an InputError of one line if the constraint is wrong."""
