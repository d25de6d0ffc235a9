"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response

from windfall.core.errors import InputError
from windfall.core.logprobs import TokenLogprob
from windfall.engine.generation import Generation
from windfall.engine.prompts import size_of
from windfall.serve.backend import Backend
from windfall.serve.calls import Form, answer, read, submit
from windfall.serve.logprobs import Placed, Reports, make_reports, token_texts
from windfall.serve.protocol import CompletionChoice, CompletionLogprobs, CompletionRequest
from windfall.serve.texts import End, Piece, finish_reason

OBJECT = "text_completion"
DEFAULT_TOKENS = 16  # of OpenAI's API


class Echo(NamedTuple):
    """What precedes a text: its prompt, if it is wanted."""

    text: str = ""
    ids: list[int] | None = None  # if their log-probabilities are wanted


def completion_routes(backend: Backend) -> APIRouter:
    routes, names = APIRouter(), token_texts(backend.model)

    @routes.post("/v1/completions", response_model=None)
    async def complete(request: Request) -> Response:
        asked = await read(request, backend, CompletionRequest)
        echoes = [Echo()] * asked.texts
        if asked.echo:
            echoes = await backend.prompts.run(size_of(asked.prompt), _echoes, backend, asked)
        reports = make_reports(names, asked.logprobs is not None, [len(echo.text) for echo in echoes])
        texts = await submit(request, backend, asked, [*asked.prompt], True, DEFAULT_TOKENS)
        choices = Choices(echoes, reports)
        write = choices.beginning(), choices.chunks, choices.whole
        form = Form("cmpl", OBJECT, OBJECT, *write, _with_text, only_text=reports is None)
        return await answer(request, backend, asked, texts, form)

    return routes


def _with_text(index: int, text: str) -> CompletionChoice:
    return CompletionChoice(index=index, text=text)


def _echoes(backend: Backend, asked: CompletionRequest) -> list[Echo]:
    with_ids = asked.prompt_logprobs is not None
    return [echo for prompt in asked.prompt for echo in [_echo(backend, prompt, with_ids)] * asked.n]


def _echo(backend: Backend, prompt: str | list[int], with_ids: bool) -> Echo:
    ids = backend.encoder.encode(prompt, raw=True) if with_ids or not isinstance(prompt, str) else []
    if isinstance(prompt, str):
        return Echo(prompt, ids if with_ids else None)
    if backend.model.tokenizer is None:
        raise InputError("echo needs a tokenizer; this model has none")
    return Echo(backend.model.tokenizer.decode(ids, skip_special_tokens=True), ids if with_ids else None)


class Choices:
    """The choices of one answer. An echo with log-probabilities is sent with the first Step, which has them."""

    def __init__(self, echoes: list[Echo], reports: Reports | None):
        self._echoes, self._reports = echoes, reports

    def beginning(self) -> list[CompletionChoice]:
        """The first choices of a stream."""
        now = [(index, echo.text) for index, echo in enumerate(self._echoes) if echo.text and echo.ids is None]
        return [CompletionChoice(index=index, text=text) for index, text in now]

    def whole(self, done: list[Generation]) -> list[CompletionChoice]:
        """The choices of a whole answer."""
        return [
            CompletionChoice(
                index=index,
                text=self._echoes[index].text + each.text,
                logprobs=None if self._reports is None else self._of_text(self._reports, index, each),
                finish_reason=finish_reason(each),
            )
            for index, each in enumerate(done)
        ]

    def _of_text(self, reports: Reports, index: int, done: Generation) -> CompletionLogprobs:
        prompt = self._of_prompt(reports, index, done.prompt_logprobs)
        return reports.as_completion([*prompt, *reports.of_text(index, done)])

    def chunks(self, index: int, piece: Piece | End) -> list[CompletionChoice]:
        """The choices for a piece of a stream."""
        logprobs = None if self._reports is None else self._of_piece(self._reports, index, piece)
        if isinstance(piece, End):
            text = self._late_echo(index) if piece.empty else ""
            return [CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish_reason(piece))]
        text = piece.text if piece.prompt_logprobs is None else self._late_echo(index) + piece.text
        return [CompletionChoice(index=index, text=text, logprobs=logprobs)] if text else []

    def _late_echo(self, index: int) -> str:
        """The echo, if `beginning` has left it out."""
        echo = self._echoes[index]
        return "" if echo.ids is None else echo.text

    def _of_piece(self, reports: Reports, index: int, piece: Piece | End) -> CompletionLogprobs | None:
        prompt = [] if isinstance(piece, End) else self._of_prompt(reports, index, piece.prompt_logprobs)
        found = [*prompt, *reports.of_piece(index, piece)]
        return reports.as_completion(found) if found else None

    def _of_prompt(self, reports: Reports, index: int, found: Iterable[TokenLogprob | None] | None) -> list[Placed]:
        ids = self._echoes[index].ids
        return [] if ids is None or found is None else reports.of_prompt(ids, found)
