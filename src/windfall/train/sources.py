"""Read prompts for training data from JSONL files, plain text files and datasets on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall.checkpoints.quiet_libs import first_line
from windfall.core.files import read_text
from windfall.core.types import InputError
from windfall.prompts import files

MAX_PASSAGE_CHARS = 500  # of a plain text that the target continues
MIN_PASSAGE_CHARS = 40  # shorter passages are dropped
DATASET = re.compile(r"(?P<name>[\w.-]+/[\w.-]+|[\w.-]+)(:(?P<split>\w+))?")  # name or name:split


@dataclass(frozen=True)
class Source:
    """A prompt: the user turns of a conversation, or a passage to continue."""

    turns: tuple[str, ...]
    chat: bool = True  # False: a passage
    origin: str = ""

    @property
    def key(self) -> int:
        """A hash that ignores white space and case, by which duplicates are found."""
        return hashed("prompt", self.chat, *(" ".join(turn.split()).casefold() for turn in self.turns))


def hashed(*parts: Any) -> int:
    """A hash below 2**63 that is the same on every machine."""
    text = json.dumps(parts, ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def share(*parts: Any) -> float:
    """The same hash as a number in [0, 1)."""
    return hashed(*parts) / 2**63


def read_sources(names: Iterable[str]) -> Iterator[Source]:
    """The prompts of these files and datasets, in order, duplicates included."""
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
    if file.suffix not in (*files.SUFFIXES, ".json"):
        yield from _passages(text, file.name)
        return
    label = f"'{file}'"
    if file.suffix == ".json" and text.lstrip().startswith("["):
        for number, row in enumerate(files.load_json(text, label), 1):
            yield from from_row(row, file.name, number, f"entry {number} of {label}")
        return
    for number, row in files.rows(text, label):
        yield from from_row(row, file.name, number, f"line {number} of {label}")


def _read_dataset(name: str, split: str) -> Iterator[Source]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise InputError(f"there is no file '{name}', and a dataset of that name needs: pip install datasets") from None
    try:
        for number, row in enumerate(datasets.load_dataset(name, split=split, streaming=True), 1):
            yield from from_row(row, name, number, f"row {number} of '{name}'")
    except InputError:
        raise
    except Exception as error:  # offline, unknown, gated, without that split...
        raise InputError(f"cannot read the dataset '{name}' ({split}): {first_line(error)}") from error


def from_row(row: Any, origin: str, number: int, place: str) -> Iterator[Source]:
    """The prompts of one row: a conversation, or the passages of a text. Blank turns are dropped."""
    asked = files.parse(row, number, place)
    if asked.raw:
        yield from _passages(asked.turns[0], origin)
    elif turns := tuple(turn for turn in asked.turns if turn.strip()):
        yield Source(turns, origin=origin)


def _passages(text: str, origin: str) -> Iterator[Source]:
    """Cut a text into passages of about MAX_PASSAGE_CHARS characters, at spaces or paragraph ends."""
    passage = ""
    for paragraph in re.split(r"\n\s*\n", text):
        passage = f"{passage}\n\n{paragraph.strip()}".strip()
        while len(passage) >= MAX_PASSAGE_CHARS:
            cut = (
                passage.rfind(" ", MIN_PASSAGE_CHARS, MAX_PASSAGE_CHARS)
                if len(passage) > MAX_PASSAGE_CHARS
                else MAX_PASSAGE_CHARS
            )
            cut = cut if cut > 0 else MAX_PASSAGE_CHARS
            yield Source((passage[:cut],), chat=False, origin=origin)
            passage = passage[cut:].strip()
    if len(passage) >= MIN_PASSAGE_CHARS:
        yield Source((passage,), chat=False, origin=origin)
