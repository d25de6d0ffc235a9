"""What the application needs of an engine, which may run in this process (`admission`) or in another (`workers`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from windfall.engine.counters import Counters
from windfall.engine.handle import Handle
from windfall.engine.prompts import ModelInfo, Prompt, PromptEncoder, size_of
from windfall.serve.prompt_threads import PromptThreads
from windfall.serve.settings import Settings

Answers = Counter[tuple[str, int]]  # by route and status
FOR_TEMPLATES = ("tools", "chat_template_kwargs")  # keywords of sampling that only the chat template needs
PROBE: dict[str, Any] = {"policy": "none", "max_new_tokens": 1, "temperature": 0, "eos": ()}  # of a text of one token


@dataclass(frozen=True)
class Job:
    """A text to be generated."""

    prompt: Prompt
    raw: bool  # whether the chat template is left out
    sampling: dict[str, Any]
    shortens: bool = False  # whether a text with fewer new tokens will do, if the memory is too small
    policy: str | None = None  # None: the engine's
    encoded: bool = False  # whether the prompt is what an encoder has returned
    whole_steps: bool = False  # whether the trees and times of Steps are needed, besides tokens and counts

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """What the chat template shows to the model besides the messages."""
        return self.sampling.get("tools")

    @property
    def template_variables(self) -> dict[str, Any] | None:
        return self.sampling.get("chat_template_kwargs")


class EngineAbout(NamedTuple):
    """What does not change while an engine runs, in words."""

    device: str
    dtype: str
    drafter: str
    policy: str


class Budget(NamedTuple):
    """What requests with the same policy share in a round."""

    passes: int
    rows: int


@dataclass(frozen=True)
class Figures:
    """The load of the whole server, and what was counted so far."""

    counters: Counters
    running: int  # texts
    waiting: int  # texts that the engine has in its queue
    expected: int  # texts that are about to be submitted
    unfinished: int  # texts that run or wait, the expected ones included
    memory: float | None  # share of the memory for KV caches that the last round took; None: unknown
    budget: Budget | None  # of the last round
    answers: Answers = field(default_factory=Counter)
    processes: tuple[int, ...] = ()  # the ids of the server's processes; the first one has the engine


class Backend(Protocol):
    """An engine as the application sees it. Its coroutines belong to the event loop of the application."""

    settings: Settings
    model: ModelInfo
    about: EngineAbout
    encoder: PromptEncoder
    prompts: PromptThreads  # in which the encoder is used
    answers: Answers  # of this process

    @property
    def max_requests(self) -> int:
        """Texts that run together at most."""

    @property
    def policies(self) -> Collection[str]:
        """The names of those that a request may choose."""

    @property
    def closed(self) -> bool:
        """Whether the engine takes no more texts."""

    @property
    def lost(self) -> object | None:
        """The error with which the device was lost; None: it is well."""

    @property
    def streams(self) -> int:
        """The texts whose Steps this process follows now."""

    @property
    def figures(self) -> Figures:
        """The figures, as they were at the last `refresh`, or later."""

    async def refresh(self, answers: bool = False) -> None:
        """Let `figures` be the present ones; with `answers`, the answers of all processes, too."""

    async def submit(self, jobs: list[Job]) -> list[Handle]:
        """Submit all of these texts, or none if one is refused. If the caller is cancelled, so are the texts."""

    async def probe(self) -> None:
        """Generate a text of one token, which raises the error with which it fails."""


def size(jobs: list[Job]) -> int:
    """The characters to be tokenized."""
    return sum(size_of([job.prompt, job.tools]) for job in {id(job.prompt): job for job in jobs}.values())


class Encoded:
    """The token ids of the prompts of several texts, each prompt encoded once."""

    def __init__(self, encoder: PromptEncoder):
        self._encoder, self._known = encoder, dict[int, list[int]]()  # by the prompt's id

    def of(self, job: Job) -> list[int]:
        if job.encoded:
            ids: list[int] = job.prompt
            return ids
        if id(job.prompt) not in self._known:
            how = (job.raw, job.tools, job.template_variables)
            self._known[id(job.prompt)] = self._encoder.encode(job.prompt, *how)
        return self._known[id(job.prompt)]
