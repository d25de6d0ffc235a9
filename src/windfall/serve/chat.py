"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from windfall.core.types import Step
from windfall.engine.engine import Generation
from windfall.serve.admission import Admission
from windfall.serve.calls import Form, answer, read, submit
from windfall.serve.logprobs import Reports, make_reports, token_texts
from windfall.serve.protocol import AssistantMessage, ChatChoice, ChatChunkChoice, ChatRequest
from windfall.serve.texts import finish_reason


def chat_routes(admission: Admission) -> APIRouter:
    routes, names = APIRouter(), token_texts(admission.engine)

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        asked = await read(request, admission, ChatRequest)
        reports = make_reports(names, asked.token_logprobs is not None, [0] * asked.n)
        messages = [message.as_dict() for message in asked.messages]
        texts = await submit(request, admission, asked, [messages], False, admission.engine.target.context)
        first = [ChatChunkChoice(index=i, delta={"role": "assistant", "content": ""}) for i in range(len(texts))]
        write = partial(_chunk, reports=reports), partial(_choices, reports=reports)
        form = Form("chatcmpl", "chat.completion", "chat.completion.chunk", first, *write, _empty)
        return await answer(request, admission, asked, texts, form)

    return routes


def _empty(index: int) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta={})


def _choices(done: list[Generation], reports: Reports | None) -> list[ChatChoice]:
    return [
        ChatChoice(
            index=index,
            message=AssistantMessage(content=each.text),
            logprobs=None if reports is None else reports.as_chat(reports.of_text(index, each)),
            finish_reason=finish_reason(each),
        )
        for index, each in enumerate(done)
    ]


def _chunk(index: int, piece: Step | Generation, reports: Reports | None) -> ChatChunkChoice | None:
    found = [] if reports is None else reports.of_piece(index, piece)
    logprobs = reports.as_chat(found) if reports is not None and found else None
    if isinstance(piece, Generation):
        return ChatChunkChoice(index=index, delta={}, logprobs=logprobs, finish_reason=finish_reason(piece))
    return ChatChunkChoice(index=index, delta={"content": piece.text}, logprobs=logprobs) if piece.text else None
