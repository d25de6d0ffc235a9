"""Prompt files: the JSON lines that `generate --file`, `train data` and benchmark tasks read.

docs/prompts.md defines it. A line is a JSON object with one of KEYS: the user's turns of a conversation, or with
`text` a text to be continued.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall.core.errors import InputError
from windfall.core.files import is_unicode, parse_json, read_text

SUFFIXES = (".jsonl", ".ndjson")
CONVERSATIONS = ("turns", "messages", "conversations", "prompt")  # the first key in this order counts
KEYS = ", ".join((*CONVERSATIONS, "instruction", "text"))
USERS = ("user", "human")
SYSTEM = "system"


@dataclass(frozen=True)
class PromptLine:
    """One line of a prompt file."""

    turns: tuple[str, ...]  # the user's messages, or the text to be continued
    number: int  # line number, or index in a JSON list
    place: str  # "line 3 of 'prompts.jsonl'", for error messages
    raw: bool = False  # a text to be continued, without a chat template
    system: str | None = None
    id: str = ""  # default: the line number
    task: str | None = None
    category: str = ""


def read(file: Path) -> list[PromptLine]:
    """The lines of a prompt file; each must have a prompt."""
    found = parse_lines(read_text(file), f"'{file}'")
    if not found:
        raise InputError(f"'{file}' has no rows")
    return found


def parse_lines(text: str, label: str) -> list[PromptLine]:
    """The lines in the content of a prompt file; `label` names the file."""
    lines = [parse(row, number, f"line {number} of {label}") for number, row in rows(text, label)]
    for each in lines:
        if not each.turns or not all(turn.strip() for turn in each.turns):
            raise InputError(f"{each.place} has an empty prompt; it needs one of {KEYS}")
    return lines


def rows(text: str, label: str) -> Iterator[tuple[int, Any]]:
    """The non-blank lines of a text as JSON values, with their numbers."""
    for number, line in enumerate(text.split("\n"), 1):  # JSON strings may contain other line breaks
        if line.strip():
            yield number, load_json(line, f"line {number} of {label}")


def load_json(text: str, place: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(f"{place} is not JSON: {str(error).splitlines()[0][:200]}") from error


def parse(row: Any, number: int, place: str) -> PromptLine:
    """One line. Blank turns are kept; the caller drops or refuses them."""
    if not isinstance(row, dict):
        raise InputError(f"{place} is not a JSON object")
    about: dict[str, Any] = {
        "id": str(row.get("id", number)),
        "task": str(row["task"]) if row.get("task") else None,
        "category": str(row.get("category") or ""),
    }
    for name in CONVERSATIONS:
        if row.get(name):
            turns, system = _conversation(row[name], place)
            return PromptLine(turns, number, place, system=system, **about)
    if isinstance(row.get("instruction"), str):
        parts = [_checked_text(part, place) for part in (row["instruction"], row.get("input") or "")]
        return PromptLine(("\n\n".join(part for part in parts if part),), number, place, **about)
    if isinstance(row.get("text"), str):
        return PromptLine((_checked_text(row["text"], place),), number, place, raw=True, **about)
    raise InputError(f"{place} has nothing to answer; it needs one of {KEYS}")


def _conversation(messages: Any, place: str) -> tuple[tuple[str, ...], str | None]:
    """The user's turns and the system message, if any; the assistant's messages are left out."""
    turns: list[str] = []
    system: str | None = None
    for turn in _as_list(messages):
        if isinstance(turn, str):
            turns.append(_checked_text(turn, place))
        elif not isinstance(turn, dict):
            raise InputError(f"{place}: a turn is a text or a message with a role and content")
        elif (role := turn.get("role", turn.get("from"))) in (*USERS, SYSTEM):
            content = _content(turn.get("content", turn.get("value")), place)
            if role == SYSTEM:
                system = content
            else:
                turns.append(content)
    return tuple(turns), system


def _as_list(messages: Any) -> Iterable[Any]:
    if isinstance(messages, str):
        return [messages]
    return messages if isinstance(messages, list) else [None]


def _content(content: Any, place: str) -> str:
    if isinstance(content, list):  # content parts of the OpenAI API
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "\n".join(_checked_text(part, place) for part in parts)
    return _checked_text(content, place)


def _checked_text(text: Any, place: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{place}: a user's message has no text")
    if not is_unicode(text):
        raise InputError(f"{place} is not valid Unicode text")
    return text
