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

from windfall.core.types import Step
from windfall.engine.engine import Generation
from windfall.serve.errors import Disconnected, as_api_error
from windfall.serve.protocol import Choice, Stamp
from windfall.serve.speculation import Cycle, CycleChunk, Cycles
from windfall.serve.texts import Piece, Texts

T = TypeVar("T")
MakeChoices = Callable[[int, "Piece | Generation"], Sequence[Choice]]

DONE = "[DONE]"


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


async def chunks(
    texts: Texts,
    stamp: Stamp,
    object: str,
    first: Sequence[BaseModel],
    choices_of: MakeChoices,
    include_usage: bool,
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

    start, end = stamp.chunk_parts(object, include_usage)

    def event(choice: BaseModel | None, cycle: Cycle | None = None) -> str:
        if cycle is None and choice is not None:
            return as_event(start + choice.model_dump_json() + end)
        answer = stamp.answer(object, [] if choice is None else [choice])
        if cycle is not None:
            answer = CycleChunk(**answer.__dict__, speculation=cycle)
        return as_event(answer.model_dump_json(exclude=None if include_usage else {"usage"}))

    done: dict[int, Generation] = {}
    ready = [event(beginning) for beginning in first]
    try:
        async with aclosing(texts.pieces(None if cycles else streams)) as pieces:
            async for number, piece in pieces:
                cycle = cycles.describe(number, piece) if cycles and isinstance(piece, Step) else None
                if isinstance(piece, Generation):
                    done[number] = piece
                choices = choices_of(number, piece)
                if choices or cycle is not None:
                    ready.append(event(choices[0] if choices else None, cycle))
                ready += [event(choice) for choice in choices[1:]]
                if ready and len(done) < len(texts):
                    yield "".join(ready), False
                    ready = []
        if include_usage:
            ready.append(as_event(stamp.answer(object, [], texts.usage([*done.values()])).model_dump_json()))
        yield "".join([*ready, as_event(DONE)]), True
    except Exception as error:
        yield "".join([*ready, as_event(json.dumps(as_api_error(error).body))]), True


def as_event(data: str) -> str:
    return f"data: {data}\n\n"
