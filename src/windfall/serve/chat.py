"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from windfall.core.errors import InputError
from windfall.engine.generation import Generation
from windfall.serve.backend import Backend
from windfall.serve.calls import Form, answer, read, submit
from windfall.serve.logprobs import Reports, make_reports, token_texts
from windfall.serve.messages import check_chat, messages_for, template_of, tools_for
from windfall.serve.protocol import AssistantMessage, ChatChoice, ChatChunkChoice, ChatRequest
from windfall.serve.texts import STOP, End, Piece, finish_reason
from windfall.serve.tool_calls import call_constraint, form_of
from windfall.serve.tool_stream import ToolStream, find_calls

TOOL_CALLS = "tool_calls"  # finish reason


def chat_routes(backend: Backend) -> APIRouter:
    routes, names = APIRouter(), token_texts(backend.model)

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        asked = await read(request, backend, ChatRequest)
        check_chat(backend.model)
        reports = make_reports(names, asked.token_logprobs is not None, [0] * asked.n)
        messages = messages_for(backend.model, asked.messages)
        more = tool_keywords(backend, asked) | {"chat_template_kwargs": asked.chat_template_kwargs}
        texts = await submit(request, backend, asked, [messages], False, backend.model.context, **more)
        first = [ChatChunkChoice(index=i, delta={"role": "assistant", "content": ""}) for i in range(len(texts))]
        answers = Answers({tool.function.name for tool in asked.offered}, len(texts), reports)
        write = answers.chunks, answers.choices
        only_text = reports is None and not asked.offered
        form = Form("chatcmpl", "chat.completion", "chat.completion.chunk", first, *write, _with_text, only_text)
        return await answer(request, backend, asked, texts, form)

    return routes


def _with_text(index: int, text: str) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta={"content": text} if text else {})


def tool_keywords(backend: Backend, asked: ChatRequest) -> dict[str, Any]:
    """The keywords of `Engine.submit` for the tools of a request."""
    if not asked.offered:
        return {}
    if asked.constraint is not None:
        raise InputError("tools and structured output exclude each other; give one, or set tool_choice to 'none'")
    model = backend.model
    given: dict[str, Any] = {"tools": tools_for(model, asked.offered)}
    if asked.must_call:
        given["constraint"] = call_constraint(form_of(template_of(model)), asked.must_call, asked.may_call_several)
    return given


class Answers:
    """The choices of an answer, with calls of tools that have these names."""

    def __init__(self, names: set[str], texts: int, reports: Reports | None):
        self._names, self._reports = names, reports
        self._streams = [ToolStream(names) for _ in range(texts)] if names else []

    def choices(self, done: list[Generation]) -> list[ChatChoice]:
        """The choices of a whole answer."""
        return [self._choice(index, each) for index, each in enumerate(done)]

    def _choice(self, index: int, done: Generation) -> ChatChoice:
        reports = self._reports
        logprobs = None if reports is None else reports.as_chat(reports.of_text(index, done))
        if not self._names:
            message, called = AssistantMessage(content=done.text), False
        else:
            found = find_calls(done.text, self._names)
            called = bool(found.calls)
            content = found.content or (None if called else "")
            message = AssistantMessage(content=content, tool_calls=found.calls or None)
        return ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=_finish(done, called))

    def chunks(self, index: int, piece: Piece | End) -> list[ChatChunkChoice]:
        """The choices for a piece of a stream, each for an event: a delta has text, or a part of one call."""
        found = [] if self._reports is None else self._reports.of_piece(index, piece)
        logprobs = self._reports.as_chat(found) if self._reports is not None and found else None
        deltas = self._deltas(index, piece)
        ends = isinstance(piece, End)
        made = [ChatChunkChoice(index=index, delta=delta) for delta in deltas or ([{}] if logprobs or ends else [])]
        if logprobs:
            made[0].logprobs = logprobs
        if isinstance(piece, End):
            made[-1].finish_reason = _finish(piece, bool(self._streams) and self._streams[index].called)
        return made

    def _deltas(self, index: int, piece: Piece | End) -> list[dict[str, Any]]:
        if self._streams:
            stream = self._streams[index]
            return stream.end() if isinstance(piece, End) else stream.push(piece.text)
        return [] if isinstance(piece, End) or not piece.text else [{"content": piece.text}]


def _finish(done: Generation | End, called: bool) -> str:
    reason = finish_reason(done)
    return TOOL_CALLS if called and reason == STOP else reason
