"""Server-sent events, and work that ends when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from windfall.core.step import Step
from windfall.serve.errors import Disconnected, as_api_error
from windfall.serve.protocol import Choice, Stamp, Usage
from windfall.serve.speculation import Cycle, CycleChunk, Cycles
from windfall.serve.texts import End, Piece, Texts

T = TypeVar("T")
MakeChoices = Callable[[int, "Piece | End"], Sequence[Choice]]

DONE = "[DONE]"
MARK = "\u241f"  # in the place of a text; no other part of a chunk after it has this character

json_text = json.JSONEncoder(ensure_ascii=False).encode


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of this work. If the client disconnects first, the work is cancelled, and Disconnected raised."""
    doing, watching = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Disconnected
        return doing.result()
    finally:
        doing.cancel()
        watching.cancel()
        await asyncio.gather(doing, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they happen. The texts are cancelled when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, texts: Texts, events: AsyncGenerator[tuple[str, bool], None]):
        """`events`: one or more at a time, and whether they are the last."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._texts, self._events = texts, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (Disconnected, OSError):
            pass
        finally:
            self._texts.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for joined, last in events:
                await send({"type": "http.response.body", "body": joined.encode(), "more_body": not last})


class Events:
    """Writes the chunks of a stream as events."""

    def __init__(
        self,
        stamp: Stamp,
        object: str,
        include_usage: bool,
        with_text: Callable[[int, str], BaseModel] | None = None,
    ):
        """`with_text`: a choice with an index and a text, if most choices are such choices. Their JSON is made once; a
        stream has hundreds of them."""
        self._stamp, self._object, self.include_usage = stamp, object, include_usage
        self._start, self._end = stamp.chunk_parts(object, include_usage)
        self._with_text, self._text_parts = with_text, dict[int, tuple[str, str]]()  # before and after the text

    def of(self, choice: BaseModel | None, cycle: Cycle | None = None) -> str:
        """The event with this choice, or without one."""
        if cycle is None and choice is not None:
            return as_event(self._start + choice.model_dump_json() + self._end)
        answer = self._stamp.answer(self._object, [] if choice is None else [choice])
        if cycle is not None:
            answer = CycleChunk(**answer.__dict__, speculation=cycle)
        return as_event(answer.model_dump_json(exclude=None if self.include_usage else {"usage"}))

    def of_text(self, number: int, piece: Piece | End) -> str | None:
        """The event with the text of a piece; empty if it has none. None: its choices may have more than text."""
        if self._with_text is None or isinstance(piece, End):
            return None
        if not piece.text:
            return ""
        if number not in self._text_parts:
            before, _, after = self.of(self._with_text(number, MARK)).rpartition(f'"{MARK}"')
            self._text_parts[number] = before, after
        before, after = self._text_parts[number]
        return f"{before}{json_text(piece.text)}{after}"

    def of_usage(self, usage: Usage) -> str:
        """The event with the figures of all texts."""
        return as_event(self._stamp.answer(self._object, [], usage).model_dump_json())


async def chunks(
    texts: Texts,
    events: Events,
    first: Sequence[BaseModel],
    choices_of: MakeChoices,
    streams: Callable[[], int],
    cycles: Cycles | None = None,
) -> AsyncGenerator[tuple[str, bool], None]:
    """The events of a stream: `first` and then all pieces as choices, the usage if it is wanted, and the end.

    Events that are ready at the same time are sent together, and `first` with the first piece. The second value says
    whether the stream ends.

    With `cycles`, each cycle has its description in its first event, which has no choice if the cycle adds no text.
    Without, cycles are joined if many texts run, the number of which is `streams()`. An error after the beginning is an
    event, too.
    """
    left = len(texts)
    ready = [events.of(beginning) for beginning in first]
    try:
        async with aclosing(texts.pieces(None if cycles else streams)) as pieces:
            async for number, piece in pieces:
                if (event := events.of_text(number, piece)) is None:
                    ready += _choices(events, choices_of(number, piece), cycles, number, piece)
                    left -= isinstance(piece, End)
                elif event:
                    ready.append(event)
                if ready and left:
                    yield "".join(ready), False
                    ready = []
        if events.include_usage:
            ready.append(events.of_usage(texts.usage()))
        yield "".join([*ready, as_event(DONE)]), True
    except Exception as error:
        yield "".join([*ready, as_event(json.dumps(as_api_error(error).body))]), True


def _choices(
    events: Events, choices: Sequence[Choice], cycles: Cycles | None, number: int, piece: Piece | End
) -> list[str]:
    """The events with the choices of a piece."""
    cycle = cycles.describe(number, piece) if cycles and isinstance(piece, Step) else None
    if not choices:
        return [] if cycle is None else [events.of(None, cycle)]
    return [events.of(choices[0], cycle), *map(events.of, choices[1:])]


def as_event(data: str) -> str:
    return f"data: {data}\n\n"
