"""The messages between an HTTP process and the process of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from windfall.core.errors import InputError
from windfall.core.logprobs import TokenLogprob
from windfall.core.step import Counts, NodeArrays, Split
from windfall.engine.prompts import ModelInfo
from windfall.serve.backend import Answers, EngineAbout, Figures, Job
from windfall.serve.errors import ApiError
from windfall.serve.settings import Settings


@dataclass(frozen=True)
class RemoteModel:
    """What is known of the model of another process."""

    name: str
    tokenizer: Any
    context: int | None
    vocab_size: int
    eos: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelInfo) -> RemoteModel:
        return cls(model.name, model.tokenizer, model.context, model.vocab_size, model.eos)


class Problem(NamedTuple):
    """An error, as it is sent."""

    kind: str  # the name of its class
    message: str
    api: dict[str, Any] | None = None  # the other arguments of an ApiError
    wrong_input: bool = False  # whether it is an InputError

    @classmethod
    def of(cls, error: BaseException) -> Problem:
        if isinstance(error, ApiError):
            about = error.body["error"]
            how = {"status": error.status, "headers": error.headers}
            return cls("ApiError", str(error), {**how, **{name: about[name] for name in ("type", "param", "code")}})
        return cls(type(error).__name__, str(error), wrong_input=isinstance(error, InputError))

    @property
    def error(self) -> Exception:
        """The error again. The class of an unexpected one has only the name of the original's."""
        if self.api is not None:
            how = dict(self.api)
            return ApiError(how.pop("status", HTTPStatus.INTERNAL_SERVER_ERROR), self.message, **how)
        if self.wrong_input:
            return InputError(self.message)
        made: Exception = type(self.kind, (Exception,), {})(self.message)
        return made


# ---- to the engine


class Ready(NamedTuple):
    """The process accepts connections."""


class Submit(NamedTuple):
    """Submits texts. If one of them is refused, none is submitted. Their prompts are token ids."""

    first: int  # the number of the first text; those of the others follow
    jobs: list[Job]


class Cancel(NamedTuple):
    text: int


class Ask(NamedTuple):
    """Asks for the figures."""

    number: int
    answers: Answers | None  # of this process; None: those of all processes are not needed


class Probe(NamedTuple):
    """Asks for a text of one token."""

    number: int


class Counted(NamedTuple):
    """The answers of this process, for a Count."""

    number: int
    answers: Answers


# ---- to an HTTP process


class Hello(NamedTuple):
    """The first message."""

    settings: Settings
    model: RemoteModel
    about: EngineAbout
    max_requests: int
    policies: tuple[str, ...]
    log_format: str
    drain_seconds: int


class Accepted(NamedTuple):
    """The texts of a Submit were submitted."""

    first: int


class Refused(NamedTuple):
    """None of the texts of a Submit was submitted."""

    first: int
    texts: int
    problem: Problem


class Details(NamedTuple):
    """The fields of a Step that are rarely set or rarely wanted."""

    finish: str | None
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    cycle: tuple[NodeArrays, Split, bool] | None  # nodes, seconds, and whether the nodes are all of the tree


SentStep = tuple[int, tuple[int, ...], Counts, "Details | None"]  # the text's number, its new tokens, …


class Round(NamedTuple):
    """The Steps of a round."""

    now: float  # when they came, in seconds of `time.perf_counter`, which all processes share
    steps: list[SentStep]


class Ended(NamedTuple):
    """A text has ended without a last Step, for this reason or with this error."""

    text: int
    reason: str | None
    problem: Problem | None


class Told(NamedTuple):
    """The answer to an Ask."""

    number: int
    figures: Figures
    closed: bool
    lost: str | None


class Probed(NamedTuple):
    """The answer to a Probe."""

    number: int
    problem: Problem | None


class Count(NamedTuple):
    """Asks for the answers of the process."""

    number: int
