"""The settings of a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from windfall.core.constraint import MAX_SOURCE_CHARACTERS
from windfall.core.errors import InputError
from windfall.core.options import is_number

MAX_BODY_BYTES = 4 * 2**20
MAX_QUEUE = 64  # requests
GRAMMAR_SECONDS = 10.0  # to compile a schema, a regular expression or a grammar
SWITCH_SECONDS = 5e-4  # after which a Python thread makes room for another: the engine's must not wait for long
DRAIN_SECONDS = 30  # that running requests have after SIGTERM or Ctrl-C


@dataclass(frozen=True)
class Settings:
    """What a server allows, and the name of its model."""

    model_name: str | None = None  # None: the name of the target
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # empty: no key is needed
    max_queue: int = MAX_QUEUE  # texts that wait, besides those that run
    request_timeout: float | None = None  # seconds after which a text ends as it is
    max_body_bytes: int = MAX_BODY_BYTES
    request_policies: tuple[str, ...] = ()  # that a request may choose, besides plain decoding
    page: bool = True  # whether there is a live page at /
    grammar_timeout: float = GRAMMAR_SECONDS  # to compile the constraint of a request
    max_grammar_chars: int = MAX_SOURCE_CHARACTERS  # of a constraint; not more than this

    def __post_init__(self) -> None:
        if self.model_name is not None and not self.model_name.strip():
            raise InputError("the name of the served model must not be empty")
        if not all(key.strip() for key in self.api_keys):
            raise InputError("an API key must not be empty")
        if not is_number(self.max_queue, whole=True) or self.max_queue < 0:
            raise InputError(f"max_queue must be a whole number of at least 0, not {self.max_queue!r}")
        if self.request_timeout is not None and not (is_number(self.request_timeout) and self.request_timeout > 0):
            raise InputError(f"request_timeout must be a number of seconds above 0, not {self.request_timeout!r}")
        if not (is_number(self.grammar_timeout) and self.grammar_timeout > 0):
            raise InputError(f"grammar_timeout must be a number of seconds above 0, not {self.grammar_timeout!r}")
        most = self.max_grammar_chars
        if not is_number(most, whole=True) or not 1 <= most <= MAX_SOURCE_CHARACTERS:
            limits = f"from 1 to {MAX_SOURCE_CHARACTERS}"
            raise InputError(f"max_grammar_chars must be a whole number {limits}, not {most!r}")
        if not is_number(self.max_body_bytes, whole=True) or self.max_body_bytes < 1:
            raise InputError(f"max_body_bytes must be a whole number of at least 1, not {self.max_body_bytes!r}")
