"""The format of prompt files: JSON lines that `generate --file`, `train data` and benchmark tasks read alike.

docs/prompts.md defines it. A line is an object with one of KEYS: a conversation (what the user says, turn by turn) or,
with `text` alone, a text to be continued.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall.core.errors import InputError
from windfall.core.files import is_unicode, parse_json, read_text

SUFFIXES = (".jsonl", ".ndjson")
CONVERSATIONS = ("turns", "messages", "conversations", "prompt")  # the first that is there counts
KEYS = ", ".join((*CONVERSATIONS, "instruction", "text"))
USERS = ("user", "human")
SYSTEM = "system"


@dataclass(frozen=True)
class Asked:
    """One line of a prompt file."""

    turns: tuple[str, ...]  # of the user; or the one text to be continued
    number: int  # of the line, or of the entry of a JSON list
    place: str  # "line 3 of 'prompts.jsonl'", for messages
    raw: bool = False  # a text to be continued, without a chat template
    system: str | None = None
    id: str = ""  # its line number, unless it says otherwise
    task: str | None = None
    category: str = ""


def read(file: Path) -> list[Asked]:
    """The lines of a prompt file. Each must have a prompt."""
    found = parse_lines(read_text(file), f"'{file}'")
    if not found:
        raise InputError(f"'{file}' has no rows")
    return found


def parse_lines(text: str, label: str) -> list[Asked]:
    """The same for its content; `label` names the file."""
    asked = [parse(row, number, f"line {number} of {label}") for number, row in rows(text, label)]
    for each in asked:
        if not each.turns or not all(turn.strip() for turn in each.turns):
            raise InputError(f"{each.place} has an empty prompt; it needs one of {KEYS}")
    return asked


def rows(text: str, label: str) -> Iterator[tuple[int, Any]]:
    """The lines of a text that are not blank, parsed as JSON, with their numbers."""
    for number, line in enumerate(text.split("\n"), 1):  # other line breaks may be part of a JSON string
        if line.strip():
            yield number, load_json(line, f"line {number} of {label}")


def load_json(text: str, place: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(f"{place} is not JSON: {str(error).splitlines()[0][:200]}") from error


def parse(row: Any, number: int, place: str) -> Asked:
    """One row. Blank turns are kept, for the caller to drop or refuse."""
    if not isinstance(row, dict):
        raise InputError(f"{place} is no JSON object")
    about: dict[str, Any] = {
        "id": str(row.get("id", number)),
        "task": str(row["task"]) if row.get("task") else None,
        "category": str(row.get("category") or ""),
    }
    for name in CONVERSATIONS:
        if row.get(name):
            turns, system = _conversation(row[name], place)
            return Asked(turns, number, place, system=system, **about)
    if isinstance(row.get("instruction"), str):
        parts = [_worded(part, place) for part in (row["instruction"], row.get("input") or "")]
        return Asked(("\n\n".join(part for part in parts if part),), number, place, **about)
    if isinstance(row.get("text"), str):
        return Asked((_worded(row["text"], place),), number, place, raw=True, **about)
    raise InputError(f"{place} has nothing to answer; it needs one of {KEYS}")


def _conversation(said: Any, place: str) -> tuple[tuple[str, ...], str | None]:
    """The user's turns, and the system message if there is one; what an assistant says is left out."""
    turns: list[str] = []
    system: str | None = None
    for turn in _listed(said):
        if isinstance(turn, str):
            turns.append(_worded(turn, place))
        elif not isinstance(turn, dict):
            raise InputError(f"{place}: a turn is a text or a message with a role and content")
        elif (role := turn.get("role", turn.get("from"))) in (*USERS, SYSTEM):
            content = _content(turn.get("content", turn.get("value")), place)
            if role == SYSTEM:
                system = content
            else:
                turns.append(content)
    return tuple(turns), system


def _listed(said: Any) -> Iterable[Any]:
    if isinstance(said, str):
        return [said]
    return said if isinstance(said, list) else [None]


def _content(content: Any, place: str) -> str:
    if isinstance(content, list):  # OpenAI's parts
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        content = "\n".join(_worded(part, place) for part in parts)
    return _worded(content, place)


def _worded(text: Any, place: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{place}: a user's message has no text")
    if not is_unicode(text):
        raise InputError(f"{place} is not valid Unicode text")
    return text
