"""What the clients of serve_soak.py send, and what the server has to answer."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import httpx

MARK = "fail in a processor"  # the server gives texts with this prompt a processor that raises an error
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TOPICS = ("rivers", "a Python function that adds numbers", "the moon", "bread", "trains", "why the sky is blue")
TOKENS = (4, 24)  # of an answer, from and to
TIMEOUT_SECONDS = 600.0  # after which a request counts as stuck; on a slow machine, the last of the queue waits long
SLOW_SCHEMA = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2500)}}  # to compile


class Case(NamedTuple):
    """A request, and the text that it must get."""

    path: str
    body: dict[str, Any]
    text: str


class Outcome(NamedTuple):
    """What became of a request."""

    kind: str
    end: str  # "right", "refused" (the queue is full), "left" (by the client), "stuck" or "wrong"
    about: str = ""


Kind = Callable[[], Coroutine[Any, Any, Outcome]]
Bad = tuple[str, bytes, str, int]  # path, body, content type and status


def _json(path: str, body: Any, status: int = 400) -> Bad:
    return path, json.dumps(body).encode(), "application/json", status


BAD: list[Bad] = [
    (TEXT, b'{"prompt": "a", ', "application/json", 400),
    (CHAT, b"\xff\xfe\x00", "application/json", 400),
    (TEXT, b"", "application/json", 400),
    (TEXT, b'{"prompt": "a"}', "text/plain", 415),
    _json(TEXT, []),
    _json(TEXT, None),
    _json(TEXT, {"prompt": 5}),
    _json(TEXT, {"prompt": "a", "max_tokens": "many"}),
    _json(TEXT, {"prompt": "a", "max_tokens": -1}),
    _json(TEXT, {"prompt": "a", "temperature": [1]}),
    _json(TEXT, {"prompt": "a", "logit_bias": {"999999999": 1}}),
    _json(TEXT, {"prompt": [10**9]}),
    _json(TEXT, {"prompt": "a", "colour": 1}),
    _json(TEXT, {"prompt": "a", "best_of": 3}),
    _json(TEXT, {"prompt": "a", "regex": "["}),
    _json(CHAT, {"messages": "hi"}),
    _json(CHAT, {"messages": [{"role": 5}]}),
    _json(CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}),
    _json(TEXT, {"prompt": "a", "model": "other"}, 404),
    _json("/v1/nothing", {}, 404),
]
HUGE: list[Bad] = [  # prompts
    _json(TEXT, {"prompt": "word " * 60_000}),
    _json(CHAT, {"messages": [{"role": "user", "content": "x" * 500_000}]}),
    _json(TEXT, {"prompt": "word " * 800_000}),
    _json(TEXT, {"prompt": "\x04" * 600_000}),  # the embedded model has no token for it
    _json(TEXT, {"prompt": " \n!?" * 120_000}),
    _json(TEXT, {"prompt": "word " * 1_000_000}, 413),
]


def make_cases(count: int, chance: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Different requests, some with long prompts."""
    made = []
    for number in range(count):
        body: dict[str, Any] = {"seed": number, "max_tokens": chance.randint(*TOKENS), "ignore_eos": True}
        body |= chance.choice([{"temperature": 0}, {"temperature": 1}, {"temperature": 0.8, "top_p": 0.9}])
        topic = chance.choice(TOPICS)
        if number % 8 == 7:
            made.append((TEXT, {**body, "prompt": f"Notes about {topic}. " * 30}))
        elif number % 8 == 6:
            made.append((TEXT, {**body, "prompt": f"{topic}: yes or no?", "regex": "(yes|no)+", "ignore_eos": False}))
        elif number % 2:
            made.append((TEXT, {**body, "prompt": f"Let me tell you about {topic}:"}))
        else:
            made.append((CHAT, {**body, "messages": [{"role": "user", "content": f"Tell me about {topic}."}]}))
    return made


class Client:
    """Sends one request after another, each of a random kind."""

    def __init__(self, http: httpx.AsyncClient, cases: list[Case], chance: random.Random):
        self._http, self._cases, self._chance = http, cases, chance
        self.kinds: dict[Kind, float] = {  # with their weights
            self.whole: 30,
            self.stream: 30,
            self.leave_stream: 8,
            self.leave_whole: 8,
            self.bad: 16,
            self.huge: 3,
            self.failing_processor: 4,
            self.slow_grammar: 0.3,
        }

    async def ask(self, kind: Kind | None = None) -> Outcome:
        """The outcome of the next request, of this kind or of a random one."""
        kind = kind or self._chance.choices([*self.kinds], [*self.kinds.values()])[0]
        name = kind.__name__.replace("_", " ")
        try:
            return await asyncio.wait_for(kind(), TIMEOUT_SECONDS)
        except asyncio.TimeoutError:
            return Outcome(name, "stuck")
        except httpx.HTTPError as error:
            return Outcome(name, "wrong", f"{type(error).__name__}: {error}")

    async def whole(self) -> Outcome:
        case = self._chance.choice(self._cases)
        answer = await self._http.post(case.path, json=case.body)
        if answer.status_code == 429:
            return Outcome("whole", "refused")
        if answer.status_code != 200:
            return Outcome("whole", "wrong", f"status {answer.status_code}: {answer.text[:200]}")
        return _compare("whole", case, text_of(answer.json()["choices"][0]), answer.json()["choices"][0])

    async def stream(self) -> Outcome:
        return await self._stream("stream", None)

    async def leave_stream(self) -> Outcome:
        """Close the connection after some events."""
        return await self._stream("leave stream", self._chance.randint(0, 6))

    async def _stream(self, kind: str, most: int | None) -> Outcome:
        case, text, last, ended = self._chance.choice(self._cases), "", dict[str, Any](), False
        async with self._http.stream("POST", case.path, json={**case.body, "stream": True}) as answer:
            if answer.status_code == 429:
                return Outcome(kind, "refused")
            if answer.status_code != 200:
                return Outcome(kind, "wrong", f"status {answer.status_code}: {(await answer.aread())[:200]!r}")
            events = 0
            async for line in answer.aiter_lines():
                if not line:
                    continue
                if most is not None and events >= most:
                    return Outcome(kind, "left")
                events, data = events + 1, line.removeprefix("data: ")
                if data == "[DONE]":
                    ended = True
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    return Outcome(kind, "wrong", data[:200])
                for last in chunk["choices"]:
                    text += text_of(last)
        return _compare(kind, case, text, last) if ended else Outcome(kind, "wrong", "the stream has no end")

    async def leave_whole(self) -> Outcome:
        """Close the connection after some time."""
        case = self._chance.choice(self._cases)
        try:
            await asyncio.wait_for(self._http.post(case.path, json=case.body), self._chance.uniform(0.001, 2))
        except asyncio.TimeoutError:
            return Outcome("leave whole", "left")
        return Outcome("leave whole", "right")

    async def bad(self) -> Outcome:
        return await self._refused("bad", self._chance.choice(BAD))

    async def huge(self) -> Outcome:
        return await self._refused("huge", self._chance.choice(HUGE))

    async def _refused(self, kind: str, bad: Bad) -> Outcome:
        path, body, content_type, status = bad
        answer = await self._http.post(path, content=body, headers={"Content-Type": content_type})
        if answer.status_code == 429:
            return Outcome(kind, "refused")
        right = answer.status_code == status and "message" in answer.json()["error"]
        return Outcome(kind, "right") if right else Outcome(kind, "wrong", f"{body[:60]!r}: {answer.status_code}")

    async def failing_processor(self) -> Outcome:
        answer = await self._http.post(TEXT, json={"prompt": MARK, "max_tokens": 20, "ignore_eos": True})
        ends = {429: "refused", 500: "right"}
        return Outcome("failing processor", ends.get(answer.status_code, "wrong"), answer.text[:200])

    async def slow_grammar(self) -> Outcome:
        schema = {**SLOW_SCHEMA, "title": str(self._chance.random())}
        answer = await self._http.post(TEXT, json={"prompt": "a", "guided_json": schema})
        ends = {429: "refused", 400: "right"}
        return Outcome("slow grammar", ends.get(answer.status_code, "wrong"), answer.text[:200])


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice, whole or of a stream."""
    part: dict[str, Any] = choice.get("message") or choice.get("delta") or choice
    return part.get("content") or part.get("text") or ""


def _compare(kind: str, case: Case, text: str, last: dict[str, Any]) -> Outcome:
    if last.get("finish_reason") not in ("stop", "length"):
        return Outcome(kind, "wrong", "there is no finish reason")
    right = text == case.text
    return Outcome(kind, "right") if right else Outcome(kind, "wrong", f"{case.body}: {text!r}, not {case.text!r}")
