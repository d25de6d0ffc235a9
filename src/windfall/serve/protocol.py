"""The bodies of requests and answers."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from windfall.serve.body import Body, wrong
from windfall.serve.neutral import CHAT, COMPLETIONS, STREAM, drop_neutral
from windfall.serve.structured import StructuredFields
from windfall.serve.tools import MAX_TOOLS, AnswerCall, Tool, ToolFields, ToolMessageFields

MAX_N = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_SHOWN = 40  # characters of a client's word in an error
MAX_TOKENS = MAX_TOKEN_ID = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**63 - MAX_N  # each of n texts adds one
PROMPT = "must be text, a list of texts, a list of token ids, or a list of such lists, and not be empty"


# ---- requests


class StreamOptions(Body):
    include_usage: bool = False
    include_speculation: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        return drop_neutral(given, STREAM)


class ModelRequest(Body):
    """A request that may name the served model."""

    model: str | None = None


class GenerationRequest(ModelRequest, StructuredFields):
    """The fields that chat and completions share."""

    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 or -1: off
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_N)
    stop: list[str] = Field([])
    stop_token_ids: list[int] = Field([])
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = Field(1.0, gt=0)
    logit_bias: dict[str, float] = Field({})
    logprobs_mode: Literal["raw", "processed"] = "raw"
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    policy: str | None = None  # None: the server's
    return_token_ids: bool = False
    resume_token_ids: list[int] = Field([])  # that the client already has of the answer

    @field_validator("stop", mode="before")
    @classmethod
    def _as_list(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, given: list[str]) -> list[str]:
        if not all(given) or len(given) > MAX_STOPS:
            raise wrong(f"must be at most {MAX_STOPS} texts that are not empty")
        return given

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, given: dict[str, float]) -> dict[str, float]:
        if not all(key.isascii() and key.isdecimal() and int(key) <= MAX_TOKEN_ID for key in given):
            raise wrong('the keys must be token ids, such as "42"')
        if len({int(key) for key in given}) < len(given):
            raise wrong("two keys are the same token id")
        return given

    @model_validator(mode="after")
    def _check_together(self) -> GenerationRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}  # 0 is a limit, too
        if len(limits) > 1:
            raise wrong("max_tokens and max_completion_tokens have the same meaning; give one of them")
        if "stream_options" in self.model_fields_set and not self.stream:
            raise wrong("stream_options needs stream to be true")
        self._check_resume()
        return self

    def _check_resume(self) -> None:
        """A text goes on as it began only if everything that it depends on is given again."""
        if not self.resume_token_ids:
            return
        if self.texts != 1:
            raise wrong(f"resume_token_ids continues one text; this request asks for {self.texts}")
        if self.seed is None and self.temperature:
            raise wrong("resume_token_ids needs the seed that the text began with, or temperature 0")

    @property
    def texts(self) -> int:
        """The number of texts that the request asks for."""
        return self.n

    @property
    def limit(self) -> int | None:
        """The largest number of new tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def token_logprobs(self) -> int | None:
        """The number of likeliest tokens to report with each new token; None: report no log-probabilities."""
        raise NotImplementedError

    @property
    def prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return None


class CompletionRequest(GenerationRequest):
    prompt: list[str] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKENS)  # 0: the prompt alone, with echo
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def token_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def texts(self) -> int:
        return len(self.prompt) * self.n

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        return drop_neutral(given, COMPLETIONS)

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.limit == 0 and not self.echo:
            raise wrong("max_tokens 0 needs echo to be true: nothing would be returned")
        if self.echo and self.resume_token_ids:
            raise wrong("resume_token_ids and echo exclude each other: the client has the prompt already")
        return self

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_prompts(cls, given: Any) -> Any:
        """All four forms as a list of texts, or as a list of lists of token ids."""
        if isinstance(given, str) or _are_ids(given):
            return [given]
        if not isinstance(given, list) or not given:
            raise wrong(PROMPT)
        if set(map(type, given)) != {str} and not all(map(_are_ids, given)):
            raise wrong(PROMPT)
        return given


def _are_ids(given: Any) -> bool:
    whole = isinstance(given, list) and set(map(type, given)) == {int}  # without a loop: there may be a million
    return whole and 0 <= min(given) <= max(given) <= MAX_TOKEN_ID


class TextPart(Body):
    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _only_text(cls, given: Any) -> Any:
        if isinstance(given, str) and given != "text":
            shown = given if given.isidentifier() and len(given) <= MAX_SHOWN else "another"
            raise wrong(f"content of type {shown} is not supported; this server takes text")
        return given


PARTS, WHOLE = "a list", "a text"  # not identifiers, so errors do not show them in the path of a field
Content = Annotated[
    Annotated[str, Tag(WHOLE)] | Annotated[list[TextPart], Tag(PARTS)],
    Discriminator(lambda given: PARTS if isinstance(given, list) else WHOLE),
]


class ChatMessage(ToolMessageFields):
    role: str = Field(min_length=1)
    content: Content
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The message as chat templates take it; several parts become lines."""
        parts = self.content
        content = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named, **self.of_tools()}


class ChatRequest(GenerationRequest, ToolFields):
    messages: list[ChatMessage] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] = Field({})
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        return drop_neutral(given, CHAT)

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs needs logprobs to be true")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        if self.resume_token_ids and self.offered:
            raise wrong("resume_token_ids cannot continue an answer that may call tools; ask again from its beginning")
        return self

    @property
    def token_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class TokenizeRequest(ModelRequest):
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)
    add_special_tokens: bool | None = None  # None: for a prompt; the chat template has them already
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field({})
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("give 'prompt' or 'messages', and not both")
        for name in ("add_generation_prompt", "tools", "chat_template_kwargs"):
            if self.messages is None and name in self.model_fields_set:
                raise wrong(f"{name} needs messages")
        return self


class DetokenizeRequest(ModelRequest):
    tokens: list[int]


# ---- answers


class Speculation(BaseModel):
    """How the texts were drafted and verified."""

    target_passes: int
    draft_passes: int
    drafted_tokens: int
    verified_tokens: int  # drafted tokens that the target scored
    accepted_tokens: int
    tokens_per_pass: float


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    speculation: Speculation


class Answer(BaseModel):
    """The fields of every answer and of every chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    """Lists with an item for each token; items of the first token of a prompt are null."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class LogprobOfToken(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class LogprobWithTop(LogprobOfToken):
    top_logprobs: list[LogprobOfToken]


class ChatLogprobs(BaseModel):
    content: list[LogprobWithTop]
    refusal: None = None


class Choice(BaseModel):
    index: int
    token_ids: list[int] | None = None  # if they are wanted; in a stream, those of one cycle


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[AnswerCall] | None = None


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunkChoice(Choice):
    delta: dict[str, Any]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Tokenized(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "windfall"
    max_model_len: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Stamp(BaseModel):
    """What all chunks of one answer have in common."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Stamp:
        return cls(id=f"{prefix}-{uuid.uuid4().hex}", created=int(time.time()), model=model)

    def answer(self, object: str, choices: list[Any], usage: Usage | None = None) -> Answer:
        return Answer(object=object, choices=choices, usage=usage, **self.model_dump())

    def chunk_parts(self, object: str, with_usage: bool) -> tuple[str, str]:
        """What precedes and follows the choice in the JSON of each chunk: making it anew for every one takes long."""
        text = self.answer(object, [None]).model_dump_json(exclude=None if with_usage else {"usage"})
        start, mark, end = text.rpartition('"choices":[null]')
        return start + mark.removesuffix("null]"), "]" + end
