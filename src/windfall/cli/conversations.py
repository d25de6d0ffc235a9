"""Saved conversations: the JSON format, and the folder where `windfall chat` saves them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from windfall.core.errors import InputError
from windfall.core.files import is_unicode, make_folder, parse_json, read_text, replace_text, user_folder

FORMAT = "windfall conversation"
VERSION = 1
ROLES = ("user", "assistant")
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
KINDS = {"model": (str, "text"), "messages": (list, "a list"), "sampling": (dict, "an object")}


@dataclass(frozen=True)
class Conversation:
    """The messages of a user and a model, and the settings of the answers."""

    model: str = ""  # its name
    target: str | None = None  # value of --target; None: the embedded model
    system: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # values by the names of SamplingOptions

    def prompt(self) -> list[dict[str, str]]:
        """All messages, for a chat template."""
        opening = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*opening, *self.messages]

    def plus(self, role: str, content: str) -> Conversation:
        return replace(self, messages=(*self.messages, {"role": role, "content": content}))

    def unanswered(self) -> Conversation:
        """The conversation up to the last message of the user."""
        end = max((place for place, each in enumerate(self.messages, 1) if each["role"] == "user"), default=0)
        return replace(self, messages=self.messages[:end])


# ---- files


def to_json(conversation: Conversation) -> str:
    record = {
        "format": FORMAT,
        "version": VERSION,
        "model": conversation.model,
        "target": conversation.target,
        "system": conversation.system,
        "messages": list(conversation.messages),
        "sampling": dict(conversation.sampling),
    }
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def from_json(text: str) -> Conversation:
    """The conversation in this text; raises InputError if it is not valid."""
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InputError(f"it is not JSON ({error})") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InputError(f'it has no "format": "{FORMAT}"')
    if found.get("version") != VERSION:
        raise InputError(f"it has format version {found.get('version')!r}; this windfall reads version {VERSION}")
    for name, (kind, wanted) in KINDS.items():
        if not isinstance(found.get(name), kind):
            raise InputError(f"its '{name}' is not {wanted}")
    for name in ("target", "system"):
        if not isinstance(found.get(name), str | None):
            raise InputError(f"its '{name}' is neither text nor null")
    messages = tuple(_message(each, place) for place, each in enumerate(found["messages"], 1))
    return Conversation(found["model"], found.get("target"), found.get("system"), messages, found["sampling"])


def _message(found: Any, place: int) -> dict[str, str]:
    role, content = (found.get("role"), found.get("content")) if isinstance(found, dict) else (None, None)
    if role not in ROLES or not isinstance(content, str) or not is_unicode(content):
        raise InputError(f"its message {place} is not a text with the role {' or '.join(ROLES)}")
    return {"role": role, "content": content}


def read(file: Path) -> Conversation:
    text = read_text(file)
    try:
        return from_json(text)
    except InputError as error:
        raise InputError(f"'{file}' is not a saved conversation: {error}") from None


def write(file: Path, conversation: Conversation) -> None:
    """Replace the file in one step; only its owner can read it."""
    text = to_json(conversation)
    if not is_unicode(text):
        raise InputError("the conversation contains text that is not valid Unicode and cannot be saved")
    replace_text(file, text, PRIVATE_FILE)


def write_new(file: Path, conversation: Conversation) -> None:
    """Write to a file that the user named; refuses to overwrite a file that is not a conversation."""
    if file.exists():
        try:
            read(file)
        except InputError:
            raise InputError(f"'{file}' exists and is not a saved conversation; choose another name") from None
    write(file, conversation)


# ---- the data folder


def data_dir() -> Path:
    """The folder for conversations and the history of typed messages."""
    return user_folder("DATA", mac="Library/Application Support", linux=".local/share")


def folder() -> Path:
    return data_dir() / "conversations"


def prepare() -> Path:
    """Make the data folder and the history file, readable by their owner only; returns the history file."""
    make_folder(data_dir().parent)
    history = data_dir() / "history"
    try:
        for each in (data_dir(), folder()):
            each.mkdir(PRIVATE_FOLDER, exist_ok=True)
        history.touch(PRIVATE_FILE)
    except OSError as error:
        raise InputError(f"cannot write to '{data_dir()}': {error.strerror or error}") from None
    return history


def last() -> Path:
    """The conversation that was saved last."""
    files = [(file.stat().st_mtime_ns, file) for file in folder().glob("*.json")]
    if not files:
        raise InputError(f"there is no conversation to continue in '{folder()}'; `windfall chat` starts one")
    return max(files)[1]


class Autosave:
    """Saves the running conversation to a file in the data folder.

    If another process has changed or removed the file since the last save, a new file is started: two chats that
    continue the same conversation do not overwrite each other.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Use a new file from the next save on."""
        self.file = folder() / f"{datetime.now():%Y-%m-%d-%H%M%S}-{uuid.uuid4().hex[:6]}.json"
        self._stamp = _stamp(self.file)

    def follow(self, file: Path) -> None:
        """Save to this file from now on if it is in the data folder, otherwise to a new one."""
        self.begin()
        if file.resolve().parent == folder().resolve():
            self.file, self._stamp = file, _stamp(file)

    def save(self, conversation: Conversation) -> None:
        if _stamp(self.file) != self._stamp:
            self.begin()
        write(self.file, conversation)
        self._stamp = _stamp(self.file)


def _stamp(file: Path) -> tuple[int, int] | None:
    """Changes whenever the file is replaced or written; None without a file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
