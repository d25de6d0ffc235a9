"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from windfall.core.errors import InputError
from windfall.core.types import Step
from windfall.engine.engine import Engine, Generation
from windfall.serve.admission import Admission
from windfall.serve.calls import Form, answer, read, submit
from windfall.serve.protocol import CompletionChoice, CompletionRequest
from windfall.serve.texts import finish_reason

OBJECT = "text_completion"
DEFAULT_TOKENS = 16  # of OpenAI's API


def completion_routes(admission: Admission) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def complete(request: Request) -> Response:
        asked = await read(request, admission, CompletionRequest)
        echoes = await asyncio.to_thread(_echoes, admission.engine, asked)
        texts = await submit(request, admission, asked, [*asked.prompt], True, DEFAULT_TOKENS)
        first = [CompletionChoice(index=index, text=echo) for index, echo in enumerate(echoes) if echo]
        form = Form("cmpl", OBJECT, OBJECT, first, _chunk, partial(_choices, echoes=echoes))
        return await answer(request, admission, asked, texts, form)

    return routes


def _echoes(engine: Engine, asked: CompletionRequest) -> list[str]:
    """What precedes each of the texts: its prompt, if it is wanted."""
    if not asked.echo:
        return [""] * (len(asked.prompt) * asked.n)
    return [_as_text(engine, prompt) for prompt in asked.prompt for _ in range(asked.n)]


def _as_text(engine: Engine, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    if engine.target.tokenizer is None:
        raise InputError("echo needs a tokenizer; this model has none")
    text: str = engine.target.tokenizer.decode(engine.encode(prompt), skip_special_tokens=True)
    return text


def _choices(done: list[Generation], echoes: list[str]) -> list[CompletionChoice]:
    return [
        CompletionChoice(index=index, text=echo + each.text, finish_reason=finish_reason(each))
        for index, (echo, each) in enumerate(zip(echoes, done, strict=True))
    ]


def _chunk(index: int, piece: Step | Generation) -> CompletionChoice | None:
    if isinstance(piece, Generation):
        return CompletionChoice(index=index, text="", finish_reason=finish_reason(piece))
    return CompletionChoice(index=index, text=piece.text) if piece.text else None
