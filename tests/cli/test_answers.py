"""`windfall generate --file PROMPTS --out ANSWERS`, on a tiny random model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import SHORT, refused, windfall
from windfall.engine.engine import Engine
from windfall.engine.request import Handle

ROWS: list[dict[str, Any]] = [
    {"prompt": "abc"},
    {"id": "two", "turns": ["a b c", "d"]},
    {"text": "once upon a time"},
    {"id": "kind", "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]},
    {"prompt": "x" * 60},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", *ROWS)


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(file: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The answers by id and turn."""
    found = [json.loads(line) for line in file.read_text("utf-8").split("\n")[:-1]]
    return {(each["id"], each["turn"]): each for each in found}


def command(folder: Path, prompts: Path, *more: object) -> tuple[object, ...]:
    return ("generate", "--file", prompts, "--target", folder, "--policy", "chain", *SHORT, *more)


def test_answers_are_those_of_one_at_a_time(folder: Path, prompts: Path, tmp_path: Path) -> None:
    sampling = ("--temperature", "0.9", "--seed", "3")
    one = windfall(*command(folder, prompts, "--json", *sampling))
    wanted = [json.loads(line) for line in one.stdout.splitlines()]
    done = windfall(*command(folder, prompts, "--out", tmp_path / "new" / "answers.jsonl", *sampling))
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith("6 answers in ")
    found = read(tmp_path / "new" / "answers.jsonl")
    assert {*found} == {("1", 1), ("two", 1), ("two", 2), ("3", 1), ("kind", 1), ("5", 1)}
    for each in wanted:
        own = found[each["id"], each["turn"]]
        assert {*own} == {*each, "options"}
        assert all(own[key] == each[key] for key in each if key != "stats")


def interrupt_after(answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C after this many answers."""
    results, result = [], Handle.result

    def counted(self: Handle, timeout: float | None = None) -> Any:
        if len(results) == answers:
            raise KeyboardInterrupt
        results.append(self)
        return result(self, timeout)

    monkeypatch.setattr(Handle, "result", counted)


def test_resume_answers_what_is_missing(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    windfall(*command(folder, prompts, "--out", whole))
    interrupt_after(3, monkeypatch)
    stopped = windfall(*command(folder, prompts, "--out", out))
    monkeypatch.undo()
    assert stopped.exit_code == 130
    assert stopped.stderr == "stopped; 3 answers kept, and --resume continues\n"
    kept = out.read_text()
    assert kept.count("\n") == 3
    with out.open("a") as file:
        file.write('{"id": "5", "line": 5, "tu')  # the process was killed here
    submitted, submit = [], Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda self, *a, **b: submitted.append(a) or submit(self, *a, **b))
    done = windfall(*command(folder, prompts, "--out", out, "--resume"))
    assert done.exit_code == 0 and len(submitted) == 3
    assert out.read_text().startswith(kept)
    texts = [{key: each["token_ids"] for key, each in read(file).items()} for file in (whole, out)]
    assert texts[0] == texts[1]
    assert windfall(*command(folder, prompts, "--out", out, "--resume")).exit_code == 0
    assert len(submitted) == 3


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        ((), ("--temperature", "0.7"), "--temperature (0.0, now 0.7)"),
        (("--temperature", "0.7", "--seed", "3"), ("--seed", "3"), "--temperature (0.7, now 0.0)"),
        (("--seed", "3"), ("--seed", "4"), "--seed (3, now 4)"),
        ((), ("--seed", "4"), "--seed (not given, now 4)"),
        (("--top-p", "0.9"), ("--max-new-tokens", "5"), "--max-new-tokens (12, now 5), --top-p (0.9, now 1.0)"),
        (("--stop", "x y"), (), '--stop (["x y"], now not given)'),
        (("--system", "be kind"), ("--raw",), '--system ("be kind", now not given), --raw (not given, now given)'),
        (("--logprobs", "1"), (), "--logprobs (1, now not given)"),
        (("--dtype", "float64"), (), '--dtype ("float64", now not given)'),
    ],
)
def test_resume_refuses_answers_that_were_made_with_other_options(
    folder: Path, tmp_path: Path, first: tuple[str, ...], later: tuple[str, ...], message: str
) -> None:
    out, prompts = tmp_path / "answers.jsonl", write(tmp_path / "prompts.jsonl", {"prompt": "abc"})
    assert windfall(*command(folder, prompts, "--out", out, *first)).exit_code == 0
    kept = out.read_text()
    said = refused(*command(folder, prompts, "--out", out, "--resume", *later))
    assert said == f"line 1 of '{out}' was made with other options: {message}; give the same, or another --out"
    assert out.read_text() == kept


def test_resume_refuses_answers_of_another_target(folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    windfall(*command(folder, prompts, "--out", out))
    for other in (tmp_path / folder.name, tmp_path / "other"):
        shutil.copytree(folder, other)
        said = refused(*command(other, prompts, "--out", out, "--resume"))
        assert f"line 1 of '{out}' was made with other options: --target" in said


def test_resume_may_change_what_does_not_change_the_text(
    folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "answers.jsonl"
    windfall(*command(folder, prompts, "--out", out))
    monkeypatch.chdir(folder.parent)
    other = ("--policy", "none", "--max-requests", "1", "--drafter", "ngram")
    assert windfall(*command(Path(folder.name), prompts, "--out", out, "--resume", *other)).exit_code == 0


def test_resume_goes_on_with_the_seed_of_the_answers(folder: Path, prompts: Path, tmp_path: Path) -> None:
    whole, out, sampling = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl", ("--temperature", "0.9")
    windfall(*command(folder, prompts, "--out", whole, *sampling))
    lines = whole.read_text().splitlines(keepends=True)
    out.write_text(lines[0])
    assert windfall(*command(folder, prompts, "--out", out, "--resume", *sampling)).exit_code == 0
    texts = [{key: (each["seed"], each["token_ids"]) for key, each in read(file).items()} for file in (whole, out)]
    assert texts[0] == texts[1]


def test_answers_without_options_are_continued(folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    windfall(*command(folder, prompts, "--out", out, "--seed", "3"))
    rows = [{key: value for key, value in each.items() if key != "options"} for each in read(out).values()]
    write(out, *rows[:2])
    assert refused(*command(folder, prompts, "--out", out, "--resume", "--seed", "4")).endswith(
        "was made with other options: --seed (3, now 4); give the same, or another --out"
    )
    done = windfall(*command(folder, prompts, "--out", out, "--resume", "--max-new-tokens", "5"))
    assert done.exit_code == 0 and len(read(out)) == 6
    assert f"'{out}' has 2 answers without their options" in done.stderr
    write(out, {**rows[0], "target": "another"})
    said = refused_after_note(*command(folder, prompts, "--out", out, "--resume"))
    assert "line 1 of" in said and "--target (another, now tiny)" in said


def test_a_conversation_continues_with_the_turn_that_is_missing(folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    windfall(*command(folder, prompts, "--out", out))
    whole = read(out)
    out.write_text(json.dumps(whole["two", 1]) + "\n")
    windfall(*command(folder, prompts, "--out", out, "--resume"))
    assert read(out)["two", 2]["token_ids"] == whole["two", 2]["token_ids"]


def test_more_prompts_than_run_together(folder: Path, tmp_path: Path) -> None:
    prompts = write(tmp_path / "many.jsonl", *({"prompt": "ab" * (1 + i % 5)} for i in range(25)))
    out = tmp_path / "answers.jsonl"
    assert windfall(*command(folder, prompts, "--out", out, "--max-requests", 2)).exit_code == 0
    assert len(read(out)) == 25


def refused_after_note(*arguments: object) -> str:
    """The error message of a command that printed a note before it."""
    result = windfall(*arguments)
    assert result.exit_code == 2
    return result.stderr.splitlines()[-1]


def test_bad_input_is_refused_in_one_line(folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    at = command(folder, prompts)
    assert refused(*at, "--resume") == "--resume continues the file of --out; give both"
    assert refused("generate", "abc", "--target", folder, "--out", out).startswith("--out takes the answers to a file")
    for flag in ("--json", "--show-drafts"):
        assert refused(*at, "--out", out, flag).startswith("--out writes JSON to a file and prints no text")
    assert refused(*at, "--out", tmp_path) == f"--out is the file to write, and '{tmp_path}' is a folder"
    assert refused(*at, "--out", out, "--kv-memory", "much").startswith("kv_memory takes a size such as 4GB")
    assert refused(*at, "--out", out, "--max-requests", 0).startswith("max_requests must be a whole number")
    assert "but kv_memory holds" in refused(*at, "--out", out, "--kv-memory", "20KB")
    long = write(tmp_path / "long.jsonl", {"prompt": "a"}, {"prompt": "a" * 300})
    assert refused(*command(folder, long, "--out", out)) == (
        f"line 2 of '{long}': the prompt has 303 tokens; tiny takes 255 at most"
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}\n", "line 1 of '{}' is not an answer that `windfall generate --out` wrote"),
        ("3\n", "line 1 of '{}' is not an answer that `windfall generate --out` wrote"),
        ("nonsense\n", "line 1 of '{}' is not JSON: "),
        ('{"id": "9", "line": 1, "turn": 1, "text": ""}\n', "line 1 of '{}' answers another file of prompts"),
        ('{"id": "1", "line": 1, "turn": 2, "text": ""}\n', "line 1 of '{}' answers another file of prompts"),
        ('{"id": "7", "line": 7, "turn": 1, "text": ""}\n', "line 1 of '{}' answers another file of prompts"),
    ],
)
def test_a_file_of_other_answers_is_refused(
    folder: Path, prompts: Path, tmp_path: Path, content: str, message: str
) -> None:
    out = tmp_path / "answers.jsonl"
    out.write_text(content)
    assert refused(*command(folder, prompts, "--out", out)).startswith(f"'{out}' exists already; continue it with")
    assert refused(*command(folder, prompts, "--out", out, "--resume")).startswith(message.format(out))
    assert out.read_text() == content
