"""Tool calls in answers: of a whole text, and as the deltas of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from windfall.serve.tool_parser import Arguments, Call, CallParser, Content, Part
from windfall.serve.tools import AnswerCall


@dataclass(frozen=True)
class Found:
    """What a text consists of."""

    content: str
    calls: list[AnswerCall]


def find_calls(text: str, names: set[str]) -> Found:
    """The calls of tools with these names in a text, and the text around them."""
    parser, content, calls = CallParser(names), "", list[AnswerCall]()
    for part in parser.push(text) + parser.end():
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, Call):
            calls.append(AnswerCall.new(part.name, ""))
        else:
            calls[-1].function.arguments += part.text
    return Found(content, calls)


class ToolStream:
    """The deltas of a text that may call tools with these names.

    The first delta of a call has its id and name, and later ones pieces of its arguments. Together they are what
    `find_calls` finds in the whole text.
    """

    def __init__(self, names: set[str]):
        self._parser = CallParser(names)
        self._calls = 0  # so far

    @property
    def called(self) -> bool:
        return self._calls > 0

    def push(self, text: str) -> list[dict[str, Any]]:
        """The deltas that a new piece of text allows."""
        return [self._delta(part) for part in self._parser.push(text)]

    def end(self) -> list[dict[str, Any]]:
        """The deltas of what is held, at the end of the text."""
        return [self._delta(part) for part in self._parser.end()]

    def _delta(self, part: Part) -> dict[str, Any]:
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Arguments):
            call: dict[str, Any] = {"function": {"arguments": part.text}}
        else:
            call = AnswerCall.new(part.name, "").model_dump()
            self._calls += 1
        return {"tool_calls": [{"index": self._calls - 1, **call}]}
