"""Prompt files: `generate`, `train data` and benchmark tasks read the same format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import SHORT, folder, refused, windfall
from windfall.bench.tasks import load_tasks
from windfall.cli.session import Session
from windfall.core.types import InputError, Step
from windfall.engine.engine import Engine, Stream
from windfall.prompts import files
from windfall.train.sources import read_sources

__all__ = ["folder"]

ROWS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"prompt": "one"}, ("one",)),
    ({"turns": ["one", "two"]}, ("one", "two")),
    ({"turns": "one"}, ("one",)),
    ({"instruction": "one", "input": "two"}, ("one\n\ntwo",)),
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]}, ("one",)),
    ({"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"}]}, ("one",)),
    ({"text": "once upon a time there was a princess, and"}, ("once upon a time there was a princess, and",)),
]


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_all_readers_find_the_same_turns(tmp_path: Path) -> None:
    file = write(tmp_path / "asked.jsonl", *(row for row, _ in ROWS))
    wanted = [turns for _, turns in ROWS]
    assert [asked.turns for asked in files.read(file)] == wanted
    assert [source.turns for source in read_sources([str(file)])] == wanted
    tasks = load_tasks([str(file)])
    assert [prompt.turns for prompt in tasks] == wanted
    assert [prompt.raw for prompt in tasks] == [False] * 6 + [True]
    assert files.read(file)[4].system == "s"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{nonsense", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"answer": "x"}', "has nothing to answer; it needs one of turns, messages, conversations, prompt"),
        ('{"prompt": "\\ud800"}', "is not valid Unicode text"),
        ('{"turns": [1]}', "a turn is a text or a message with a role and content"),
    ],
)
def test_every_reader_names_a_malformed_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text('{"prompt": "right"}\n\n' + line)
    told = refused("generate", "--file", file)  # before a model is loaded
    assert told.startswith(f"line 3 of '{file}'")
    assert message in told
    for read in (lambda: load_tasks([str(file)]), lambda: list(read_sources([str(file)]))):
        with pytest.raises(InputError) as raised:
            read()
        assert str(raised.value) == told


# ---- generate


def test_every_line_is_answered(folder: Path, tmp_path: Path) -> None:
    alone = [json.loads(windfall("generate", text, "--target", folder, "--json", *SHORT).stdout) for text in "ab"]
    rows = [{"prompt": "a", "id": "first"}, {"messages": [{"role": "user", "content": "b"}]}, {"text": "abc"}]
    file = write(tmp_path / "asked.jsonl", *rows, {"turns": ["a", "c"]})
    result = windfall("generate", "--file", file, "--target", folder, "--json", *SHORT)
    told = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 0
    assert [(each["id"], each["line"], each["turn"]) for each in told] == [
        ("first", 1, 1),
        ("2", 2, 1),
        ("3", 3, 1),
        ("4", 4, 1),
        ("4", 4, 2),
    ]
    assert [each["token_ids"] for each in told[:2]] == [each["token_ids"] for each in alone]
    raw = json.loads(windfall("generate", "abc", "--raw", "--target", folder, "--json", *SHORT).stdout)
    assert told[2]["token_ids"] == raw["token_ids"]
    assert told[3]["token_ids"] == alone[0]["token_ids"]
    shown = windfall("generate", "--file", file, "--target", folder, *SHORT).stdout
    assert shown.startswith(f"first\n{alone[0]['text']}\n2\n{alone[1]['text']}\n3\n")
    assert "4, turn 2\n" in shown


def test_later_turns_see_the_answers_before_them(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answer = Session.answer

    def remember(self: Session, prompt: Any) -> Any:
        asked.append([dict(each) for each in prompt])
        return answer(self, prompt)

    monkeypatch.setattr(Session, "answer", remember)
    file = write(tmp_path / "asked.jsonl", {"turns": ["a", "b"]})
    result = windfall("generate", "--file", file, "--target", folder, "--system", "s", "--json", *SHORT)
    first = json.loads(result.stdout.splitlines()[0])["text"]
    assert asked[0] == [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert asked[1][2:] == [{"role": "assistant", "content": first}, {"role": "user", "content": "b"}]


def test_control_c_keeps_finished_answers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, started = Engine.stream, []

    def interrupted(self: Engine, *arguments: Any, **keywords: Any) -> Any:
        started.append(arguments)
        made = stream(self, *arguments, **keywords)

        def steps() -> Iterator[Step]:
            for place, step in enumerate(made):
                if len(started) == 2 and place == 1:
                    raise KeyboardInterrupt
                yield step

        return Stream(steps(), made.prompt_tokens, made.seed)

    monkeypatch.setattr(Engine, "stream", interrupted)
    file = write(tmp_path / "asked.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    result = windfall("generate", "--file", file, "--target", folder, "--policy", "none", "--json", *SHORT)
    assert result.exit_code == 130
    reasons = [json.loads(line)["finish_reason"] for line in result.stdout.splitlines()]
    assert reasons == ["length", "interrupted"]


def test_the_error_names_the_line_that_cannot_be_answered(folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "asked.jsonl", {"prompt": "a"}, {"prompt": "a" * 300})
    result = windfall("generate", "--file", file, "--target", folder, "--json", *SHORT)
    assert result.exit_code == 2
    assert len(result.stdout.splitlines()) == 1
    assert result.stderr.splitlines()[-1].startswith(f"windfall: line 2 of '{file}': ")


def test_options_that_exclude_a_prompt_file(tmp_path: Path) -> None:
    file = write(tmp_path / "asked.jsonl", {"prompt": "a"})
    assert "give a prompt or --file, not both" in refused("generate", "x", "--file", file)
    assert "--compare takes one prompt" in refused("generate", "--compare", "--file", file)
    assert "holds prompts for `windfall generate`" in refused("tree", "--file", file)
    assert "has no rows" in refused("generate", "--file", write(tmp_path / "empty.jsonl"))
