"""What chat and completions have in common: reading a request, its sampling, submitting its texts, answering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.requests import ClientDisconnect

from windfall.engine.generation import Generation
from windfall.engine.prompts import ModelInfo, Prompt
from windfall.serve.backend import Backend, Job
from windfall.serve.errors import ApiError, Disconnected
from windfall.serve.policies import chosen
from windfall.serve.protocol import Choice, GenerationRequest, ModelRequest, Stamp
from windfall.serve.speculation import Cycles
from windfall.serve.streaming import Events, EventStream, MakeChoices, chunks, while_connected
from windfall.serve.texts import End, Piece, Texts

R = TypeVar("R", bound=ModelRequest)

SHARED = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")  # same names


ONE_TOKEN = {"max_new_tokens": 1, "eos": (), "stop": ()}  # for the prompt alone: the token is left out of the answer


def served_name(backend: Backend) -> str:
    """The name of the model that clients use."""
    return backend.settings.model_name or backend.model.name


def check_model(backend: Backend, name: str | None) -> None:
    """Refuse the name of another model."""
    known = served_name(backend)
    if name is not None and name != known:
        message = f"the model '{name}' does not exist; this server has '{known}'"
        raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")


async def read(request: Request, backend: Backend, kind: type[R]) -> R:
    """The body of a request for the served model.

    Content types other than JSON are refused, because web pages may send them to any server.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        message = "send the body as JSON, with the header Content-Type: application/json"
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_content_type")
    try:
        body = await request.body()
    except ClientDisconnect:
        raise Disconnected from None
    asked = kind.model_validate_json(body)
    check_model(backend, asked.model)
    return asked


async def submit(
    request: Request,
    backend: Backend,
    asked: GenerationRequest,
    prompts: list[Prompt],
    raw: bool,
    limit: int | None,
    **more: Any,
) -> Texts:
    """Submit n texts for each prompt, with seeds one after another.

    `raw` leaves out the chat template; `limit` is the default number of new tokens; `more` are other keywords of
    `Engine.submit`.
    """
    sampling = {**sampling_of(backend.model, asked, limit), **more}
    policy = chosen(backend.policies, asked.policy)
    seeds = [None if asked.seed is None else asked.seed + number for number in range(asked.n)]
    whole_steps = asked.stream and asked.stream_options.include_speculation
    how: dict[str, Any] = {"shortens": asked.limit is None, "policy": policy, "whole_steps": whole_steps}
    jobs = [Job(prompt, raw, {**sampling, "seed": seed}, **how) for prompt in prompts for seed in seeds]
    texts = Texts(await while_connected(request.receive, backend.submit(jobs)), asked.n, asked.limit == 0)
    request.state.texts = texts  # for the log
    return texts


class Form(NamedTuple):
    """How an answer is written, whole or in chunks."""

    prefix: str  # of its id
    whole: str  # the field `object` of a whole answer
    chunk: str  # and of a chunk
    beginning: Sequence[Choice]  # the first choices of a stream
    chunks_of: MakeChoices  # the choices for a piece of a stream, each for an event
    choices_of: Callable[[list[Generation]], Sequence[Choice]]  # the choices of a whole answer
    with_text: Callable[[int, str], Choice]  # a choice of a stream with this index and text
    only_text: bool  # whether all choices of a stream between the first ones and the last are such choices


def with_token_ids(form: Form) -> Form:
    """The same form with the ids of tokens: of each cycle in a stream, also if it adds no text."""

    def chunks_of(index: int, piece: Piece | End) -> Sequence[Choice]:
        choices = form.chunks_of(index, piece)
        if not isinstance(piece, End):
            choices = choices or [form.with_text(index, "")]
            choices[0].token_ids = [*piece.tokens]
        return choices

    def choices_of(done: list[Generation]) -> Sequence[Choice]:
        choices = form.choices_of(done)
        for choice, each in zip(choices, done, strict=True):
            choice.token_ids = each.token_ids
        return choices

    return form._replace(chunks_of=chunks_of, choices_of=choices_of, only_text=False)


async def answer(request: Request, backend: Backend, asked: GenerationRequest, texts: Texts, form: Form) -> Response:
    """The answer with these texts: a stream if it is wanted, else one JSON object."""
    stamp = Stamp.new(form.prefix, served_name(backend))
    form = with_token_ids(form) if asked.return_token_ids else form
    if asked.stream:
        wanted, tokenizer = asked.stream_options, backend.model.tokenizer
        cycles = Cycles(texts, tokenizer, tuple(asked.stop)) if wanted.include_speculation else None
        with_text = form.with_text if form.only_text and cycles is None else None
        events = Events(stamp, form.chunk, wanted.include_usage, with_text)
        given = (form.beginning, form.chunks_of, lambda: backend.streams, cycles)
        return EventStream(texts, chunks(texts, events, *given))
    done = await while_connected(request.receive, texts.results())
    whole = stamp.answer(form.whole, [*form.choices_of(done)], texts.usage())
    return Response(whole.model_dump_json(), media_type="application/json")


def sampling_of(model: ModelInfo, asked: GenerationRequest, limit: int | None) -> dict[str, Any]:
    """The keywords of `Engine.submit`, without the seed."""
    own_eos = () if asked.ignore_eos else model.eos
    most = limit if asked.limit is None else asked.limit
    _check_ids(model, asked.stop_token_ids)
    return {
        **{name: getattr(asked, name) for name in SHARED},
        **({} if most is None else {"max_new_tokens": most}),
        "top_k": max(asked.top_k, 0),
        "stop": tuple(asked.stop),
        "logit_bias": {int(token): bias for token, bias in asked.logit_bias.items()},
        "eos": (*own_eos, *asked.stop_token_ids),
        "constraint": asked.constraint,
        "logprobs": asked.token_logprobs,
        "logprobs_mode": asked.logprobs_mode,
        "prompt_logprobs": asked.prompt_logprobs,
        "resume_token_ids": asked.resume_token_ids,
        **(ONE_TOKEN if most == 0 else {}),
    }


def _check_ids(model: ModelInfo, stop_token_ids: list[int]) -> None:
    last = model.vocab_size - 1
    if not all(0 <= token <= last for token in stop_token_ids):
        message = f"stop_token_ids takes token ids between 0 and {last}"
        raise ApiError(HTTPStatus.BAD_REQUEST, message, param="stop_token_ids")
