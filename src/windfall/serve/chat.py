"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from windfall.core.types import Step
from windfall.engine.engine import Generation
from windfall.serve.admission import Admission
from windfall.serve.calls import Form, answer, read, submit
from windfall.serve.protocol import AssistantMessage, ChatChoice, ChatChunkChoice, ChatRequest
from windfall.serve.texts import finish_reason


def chat_routes(admission: Admission) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        asked = await read(request, admission, ChatRequest)
        messages = [message.as_dict() for message in asked.messages]
        texts = await submit(request, admission, asked, [messages], False, admission.engine.target.context)
        first = [ChatChunkChoice(index=i, delta={"role": "assistant", "content": ""}) for i in range(len(texts))]
        form = Form("chatcmpl", "chat.completion", "chat.completion.chunk", first, _chunk, _choices)
        return await answer(request, admission, asked, texts, form)

    return routes


def _choices(done: list[Generation]) -> list[ChatChoice]:
    return [
        ChatChoice(index=index, message=AssistantMessage(content=each.text), finish_reason=finish_reason(each))
        for index, each in enumerate(done)
    ]


def _chunk(index: int, piece: Step | Generation) -> ChatChunkChoice | None:
    if isinstance(piece, Generation):
        return ChatChunkChoice(index=index, delta={}, finish_reason=finish_reason(piece))
    return ChatChunkChoice(index=index, delta={"content": piece.text}) if piece.text else None
