"""Saved conversations: the file format, the data folder and saving."""

from __future__ import annotations

import json
import stat
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from windfall.cli import conversations
from windfall.cli.conversations import Autosave, Conversation, from_json, read, to_json, write
from windfall.cli.options import SamplingOptions
from windfall.core.errors import InputError

TALK = Conversation("fake", None, "be kind").plus("user", "a\n\tb\n").plus("assistant", "“c”")


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDFALL_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_a_saved_conversation_is_read_back(tmp_path: Path) -> None:
    talk = replace(TALK, sampling=asdict(SamplingOptions(temperature=0.7)), target="/some/folder")
    write(tmp_path / "talk.json", talk)
    assert read(tmp_path / "talk.json") == talk
    found = json.loads((tmp_path / "talk.json").read_text())
    assert list(found) == ["format", "version", "model", "target", "system", "messages", "sampling"]
    assert "“c”" in (tmp_path / "talk.json").read_text()
    assert stat.S_IMODE((tmp_path / "talk.json").stat().st_mode) == 0o600
    assert [message["role"] for message in talk.prompt()] == ["system", "user", "assistant"]
    assert talk.unanswered().messages == talk.messages[:1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, 'it has no "format": "windfall conversation"'),
        ({"version": 2}, "it has format version 2; this windfall reads version 1"),
        ({"model": 5}, "its 'model' is not text"),
        ({"system": 5}, "its 'system' is neither text nor null"),
        ({"messages": {}}, "its 'messages' is not a list"),
        ({"messages": [{"role": "user", "content": "a"}, "b"]}, "its message 2 is not a text with the role"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "its message 1 is not a text with the role"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "its message 1 is not a text with the role"),
        ({"sampling": []}, "its 'sampling' is not an object"),
    ],
)
def test_damaged_conversations_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({**json.loads(to_json(TALK)), **changes}))
    with pytest.raises(InputError, match=f"^'{file}' is not a saved conversation: {message}"):
        read(file)


@pytest.mark.parametrize("text", ["", "[1]", to_json(TALK)[:-20], "[" * 100_000])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"it is not JSON|it has no .format"):
        from_json(text)


def test_the_data_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "shared"))
    assert conversations.data_dir() == tmp_path / "data"
    monkeypatch.delenv("WINDFALL_DATA")
    assert conversations.data_dir() == tmp_path / "shared" / "windfall"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr("sys.platform", "linux")
    assert conversations.data_dir() == Path.home() / ".local" / "share" / "windfall"
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(InputError, match="the home folder is unknown"):
        conversations.data_dir()


def test_two_chats_that_continue_one_conversation_use_two_files() -> None:
    conversations.prepare()
    first = Autosave()
    first.save(TALK)
    second = Autosave()
    second.follow(first.file)
    second.save(TALK.plus("user", "from the second"))
    first.save(TALK.plus("user", "from the first"))
    assert first.file != second.file
    assert read(second.file).messages[-1]["content"] == "from the second"
    assert read(first.file).messages[-1]["content"] == "from the first"
