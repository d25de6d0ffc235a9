"""Prompts from wherever they are: JSON lines of several dialects, plain texts, datasets on the hub."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall.files import is_unicode, parse_json, read_text
from windfall.quiet import first_line
from windfall.records import InputError

PASSAGE = 500  # characters of a plain text that the target is given to continue
LEAST = 40  # characters under which a passage is not worth continuing
USERS = ("user", "human")
DATASET = re.compile(r"(?P<name>[\w.-]+/[\w.-]+|[\w.-]+)(:(?P<split>\w+))?")  # a hub name, maybe with its split
KEYS = "turns, messages, conversations, prompt, instruction, text"


@dataclass(frozen=True)
class Source:
    """What a user says, turn by turn, or a passage to be continued."""

    turns: tuple[str, ...]
    chat: bool = True  # False: a passage
    origin: str = ""

    @property
    def key(self) -> int:
        """The same for prompts that differ in white space and case alone."""
        return hashed("prompt", self.chat, *(" ".join(turn.split()).casefold() for turn in self.turns))


def hashed(*parts: Any) -> int:
    """A number below 2**63 that depends on these alone, on every machine."""
    text = json.dumps(parts, ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def share(*parts: Any) -> float:
    """The same as a number in [0, 1)."""
    return hashed(*parts) / 2**63


def read_sources(names: Iterable[str]) -> Iterator[Source]:
    """Everything in these files and datasets, in order, doubles included."""
    for name in names:
        if Path(name).is_file():
            yield from _read_file(Path(name))
        elif Path(name).is_dir():
            raise InputError(f"'{name}' is a folder; name the files in it")
        elif (match := DATASET.fullmatch(name)) and not name.endswith((".jsonl", ".json", ".txt")):
            yield from _read_dataset(match["name"], match["split"] or "train")
        else:
            raise InputError(f"there is no file '{name}'")


def _read_file(file: Path) -> Iterator[Source]:
    text = read_text(file)
    if file.suffix not in (".jsonl", ".ndjson", ".json"):
        yield from _passages(text, file.name)
        return
    for place, row in _rows(text, file):
        yield from from_row(row, file.name, f"{place} of '{file}'")


def _rows(text: str, file: Path) -> Iterator[tuple[str, Any]]:
    if file.suffix == ".json" and text.lstrip().startswith("["):
        yield from ((f"entry {n}", row) for n, row in enumerate(_parse(text, f"'{file}'"), 1))
        return
    for number, line in enumerate(text.split("\n"), 1):  # other line breaks may be part of a JSON string
        if line.strip():
            yield f"line {number}", _parse(line, f"line {number} of '{file}'")


def _parse(text: str, place: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(f"{place} is not JSON: {first_line(error)}") from error


def _read_dataset(name: str, split: str) -> Iterator[Source]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise InputError(f"there is no file '{name}', and a dataset of that name needs: pip install datasets") from None
    try:
        for number, row in enumerate(datasets.load_dataset(name, split=split, streaming=True), 1):
            yield from from_row(row, name, f"row {number} of '{name}'")
    except InputError:
        raise
    except Exception as error:  # offline, unknown, gated, without that split...
        raise InputError(f"cannot read the dataset '{name}' ({split}): {first_line(error)}") from error


def from_row(row: Any, origin: str, place: str) -> Iterator[Source]:
    """What a row asks: a conversation's user turns, a prompt, or passages of a text."""
    if not isinstance(row, dict):
        raise InputError(f"{place} is no JSON object")
    for name in ("turns", "messages", "conversations", "prompt"):
        if row.get(name):
            turns = tuple(turn for turn in _user_turns(row[name], place) if turn.strip())
            yield from [Source(turns, origin=origin)] if turns else []
            return
    if isinstance(row.get("instruction"), str):
        parts = [_worded(part, place) for part in (row["instruction"], row.get("input") or "")]
        asked = "\n\n".join(part for part in parts if part)
        yield from [Source((asked,), origin=origin)] if asked.strip() else []
    elif isinstance(row.get("text"), str):
        yield from _passages(_worded(row["text"], place), origin)
    else:
        raise InputError(f"{place} has nothing to answer; it needs one of {KEYS}")


def _user_turns(said: Any, place: str) -> Iterator[str]:
    for turn in [said] if isinstance(said, str) else said if isinstance(said, list) else [None]:
        if isinstance(turn, str):
            yield _worded(turn, place)
        elif isinstance(turn, dict):
            if turn.get("role", turn.get("from")) in USERS:
                yield _content(turn.get("content", turn.get("value")), place)
        else:
            raise InputError(f"{place}: a turn is a text or a message with a role and content")


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


def _passages(text: str, origin: str) -> Iterator[Source]:
    """Stretches of about PASSAGE characters; none goes over a blank line that ends one long enough."""
    passage = ""
    for paragraph in re.split(r"\n\s*\n", text):
        passage = f"{passage}\n\n{paragraph.strip()}".strip()
        while len(passage) >= PASSAGE:
            cut = passage.rfind(" ", LEAST, PASSAGE) if len(passage) > PASSAGE else PASSAGE
            cut = cut if cut > 0 else PASSAGE
            yield Source((passage[:cut],), chat=False, origin=origin)
            passage = passage[cut:].strip()
    if len(passage) >= LEAST:
        yield Source((passage,), chat=False, origin=origin)
