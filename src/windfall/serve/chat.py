"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from windfall.core.types import Step
from windfall.engine.engine import Generation
from windfall.serve.admission import Admission
from windfall.serve.calls import check_model, read, served_name, submit
from windfall.serve.protocol import AssistantMessage, ChatChoice, ChatChunkChoice, ChatRequest, Stamp
from windfall.serve.streaming import EventStream, chunks, while_connected
from windfall.serve.texts import finish_reason

WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"


def chat_routes(admission: Admission) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        asked = await read(request, ChatRequest)
        check_model(admission, asked.model)
        messages = [message.as_dict() for message in asked.messages]
        texts = await submit(request, admission, asked, [messages], False, admission.engine.target.context)
        stamp = Stamp.new("chatcmpl", served_name(admission))
        if asked.stream:
            first = [ChatChunkChoice(index=i, delta={"role": "assistant", "content": ""}) for i in range(len(texts))]
            usage = asked.stream_options.include_usage
            return EventStream(texts, chunks(texts, stamp, CHUNK, first, _chunk, usage))
        done = await while_connected(request.receive, texts.results())
        return JSONResponse(stamp.answer(WHOLE, _choices(done), texts.usage(done)).model_dump())

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
