"""Reading prompts from files and datasets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from windfall.core.types import InputError
from windfall.train.sources import MAX_PASSAGE_CHARS, Source, read_sources


def read(*files: Path) -> list[Source]:
    return list(read_sources(map(str, files)))


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"id": "a", "turns": ["one", "two"]}, ("one", "two")),
        ({"prompt": "one"}, ("one",)),
        ({"prompt": [{"role": "user", "content": "one"}]}, ("one",)),
        ({"instruction": "one", "input": "two"}, ("one\n\ntwo",)),
        ({"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"}]}, ("one",)),
        (
            {
                "messages": [
                    {"role": "system", "content": "x"},
                    {"role": "user", "content": "one"},
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": [{"type": "text", "text": "two"}]},
                ]
            },
            ("one", "two"),
        ),
    ],
)
def test_prompt_formats(tmp_path: Path, row: dict[str, Any], turns: tuple[str, ...]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(row) + "\n\n" + json.dumps(row))
    assert read(file) == [Source(turns, True, "prompts.jsonl")] * 2
    listed = tmp_path / "prompts.json"
    listed.write_text(json.dumps([row]))
    assert [source.turns for source in read(listed)] == [turns]


def test_plain_text_is_cut_into_passages(tmp_path: Path) -> None:
    paragraphs = [f"{word} " * 60 for word in ("alpha", "beta", "gamma", "delta")]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    passages = read(tmp_path / "book.txt")
    assert all(not source.chat and len(source.turns[0]) <= MAX_PASSAGE_CHARS for source in passages)
    assert " ".join(s.turns[0] for s in passages).split() == " ".join(paragraphs).split()


def test_keys_ignore_white_space_and_case() -> None:
    assert Source(("Hello  there\n",)).key == Source(("hello There",)).key
    assert Source(("a", "b")).key != Source(("a b",)).key
    assert Source(("a",)).key != Source(("a",), chat=False).key


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "{", "line 1 of '.*a.jsonl' is not JSON"),
        ("a.jsonl", '{"prompt":' + 20_000 * "[" + 20_000 * "]" + "}", "line 1 of '.*a.jsonl' is not JSON"),
        ("a.jsonl", '{"prompt": "\\ud800 hi"}', "line 1 of '.*a.jsonl' is not valid Unicode"),
        ("a.jsonl", '{"instruction": "x", "input": 5}', "line 1 of '.*a.jsonl': a user's message has no text"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "message has no text"),
        ("a.jsonl", '{"prompt": "x"}\n[1]', "line 2 of .* is not a JSON object"),
        ("a.jsonl", '{"answer": "x"}', "needs one of turns, messages"),
        ("a.jsonl", '{"turns": [1]}', "a turn is a text or a message"),
    ],
)
def test_bad_prompts_are_reported_with_their_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


def test_missing_files_and_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="there is no file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="is a folder"):
        read(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        list(read_sources(["some/dataset:test"]))
