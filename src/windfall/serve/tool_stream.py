"""Finds tool calls in a text that arrives in pieces."""

from __future__ import annotations

from typing import Any

from windfall.serve.tool_calls import CLOSING, MARKS, OPENING, find_calls

STARTS = (OPENING, *MARKS, "{", "[")  # of a text that may be a call


class ToolStream:
    """Holds text back while it may belong to a call. Calls between tags are sent as soon as they are complete."""

    def __init__(self, names: set[str]):
        self._names, self._held = names, ""
        self._calls = 0  # sent so far
        self._is_content = False  # whether the text has begun with something that is no call

    @property
    def called(self) -> bool:
        return self._calls > 0

    def push(self, text: str) -> dict[str, Any]:
        """The delta that a new piece of text allows; empty if there is none."""
        self._held += text
        if OPENING in self._held:
            end = self._held.rfind(CLOSING)
            return self._flush(end + len(CLOSING)) if end >= 0 else self._flush(self._held.index(OPENING))
        if not self._is_content and self._may_be_call():
            return {}
        self._is_content = True
        return self._flush(len(self._held) - self._started_tag())

    def end(self) -> dict[str, Any]:
        """The delta of what is held, at the end of the text."""
        return self._flush(len(self._held))

    def _flush(self, end: int) -> dict[str, Any]:
        """The delta of the first part of what is held."""
        part, self._held = self._held[:end], self._held[end:]
        if self._is_content and OPENING not in part:
            content, calls = part, []
        else:
            found = find_calls(part, self._names)
            content, calls = found.content, found.calls
        if self._calls and not content.strip():  # line breaks between calls
            content = ""
        first, self._calls = self._calls, self._calls + len(calls)
        numbered = [{"index": first + place, **call.model_dump()} for place, call in enumerate(calls)]
        return {**({"content": content} if content else {}), **({"tool_calls": numbered} if calls else {})}

    def _may_be_call(self) -> bool:
        text = self._held.lstrip()
        if any(start.startswith(text) or text.startswith(start) for start in STARTS):
            return True
        return any(name.startswith(text) or text.startswith(name) for name in self._names)

    def _started_tag(self) -> int:
        """The length of the tail that may become a tag."""
        sizes = range(min(len(OPENING) - 1, len(self._held)), 0, -1)
        return next((size for size in sizes if OPENING.startswith(self._held[-size:])), 0)
