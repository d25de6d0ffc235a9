from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from windfall.bench import tasks
from windfall.bench.tasks import HUB, Prompt, builtin, in_turns, load_tasks, read_file, spread
from windfall.core.types import InputError


def test_the_built_in_set_has_ten_prompts_of_six_kinds() -> None:
    prompts = builtin()
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(
        ("chat", "code", "math", "writing", "summarization", "qa"), 10
    )
    assert len({prompt.id for prompt in prompts}) == len({prompt.turns for prompt in prompts}) == 60
    assert {prompt.task for prompt in prompts} == {"builtin"} and not any(prompt.raw for prompt in prompts)
    assert sum(len(prompt.turns) == 2 for prompt in prompts) >= 6
    assert all(len(prompt.turns[0]) > 400 for prompt in prompts if prompt.category == "summarization")


def test_rows_of_a_file(tmp_path: Path) -> None:
    rows = [
        {"id": "a/1", "category": "math", "turns": ["one", "two"]},
        {"id": 7, "task": "other", "text": "Once upon a time"},
        {"turns": ["no id"]},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    assert load_tasks([str(file)]) == [
        Prompt("mine", "math", "a/1", ("one", "two")),
        Prompt("other", "", "7", ("Once upon a time",), raw=True),
        Prompt("mine", "", "5", ("no id",)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"turns": ["a"]}\n{nonsense', "line 2 of {file} is not JSON"),
        ('{"turns": ["\\ud800"]}', "line 1 of {file} is not valid Unicode"),
        ("[1]", "line 1 of {file} is not a JSON object"),
        ('{"id": 1}', "line 1 of {file} has nothing to answer; it needs one of turns, messages"),
        ('{"turns": []}', "line 1 of {file} has nothing to answer"),
        ('{"turns": ["a", " "]}', "line 1 of {file} has an empty prompt"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 1 of {file} has an empty prompt"),
        ('{"text": ""}', "line 1 of {file} has an empty prompt"),
        ("\n", "has no rows"),
        ('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}', "two prompts with the id '1'"),
    ],
)
def test_wrong_rows_are_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "wrong.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=re.escape(message.format(file=f"'{file}'"))) as raised:
        load_tasks([str(file)])
    assert "\n" not in str(raised.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read '.*none\.jsonl': No such file"):
        read_file(tmp_path / "none.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read_file(tmp_path / "latin.jsonl")
    with pytest.raises(
        InputError, match="no task 'mtbench'; give a JSONL file, builtin, or one of mt-bench, humaneval"
    ):
        load_tasks(["mtbench"])


def test_a_limit_is_spread_over_categories() -> None:
    prompts = [Prompt("t", category, f"{n}", ("x",)) for n, category in enumerate("aaaabbc")]
    assert [prompt.id for prompt in spread(prompts, 3)] == ["0", "4", "6"]
    assert [prompt.id for prompt in spread(prompts, 5)] == ["0", "1", "4", "5", "6"]
    assert spread(prompts, 99) == prompts
    chosen = load_tasks(["builtin"], limit=12)
    assert set(Counter(prompt.category for prompt in chosen).values()) == {2}


def test_a_limit_counts_for_every_task(tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    rows = [{"id": n, "task": task, "text": "x"} for task in "pq" for n in range(5)]
    file.write_text("\n".join(map(json.dumps, rows)))
    chosen = load_tasks([str(file), "builtin"], limit=2)
    assert Counter(prompt.task for prompt in chosen) == {"p": 2, "q": 2, "builtin": 2}


def test_tasks_take_turns() -> None:
    prompts = [
        Prompt(task, "", str(place), ("x",)) for task, count in (("a", 3), ("b", 1), ("c", 2)) for place in range(count)
    ]
    assert [prompt.task + prompt.id for prompt in in_turns(prompts)] == ["a0", "b0", "c0", "a1", "c1", "a2"]


# ---- the hub

ROWS = {
    "mt-bench": ({"prompt": ["first", "second"], "category": "writing"}, ("first", "second")),
    "humaneval": ({"prompt": "def f():", "task_id": "x"}, ("Complete this Python function.\n\ndef f():",)),
    "gsm8k": ({"question": "how many?", "answer": "3"}, ("how many?",)),
    "alpaca": ({"instruction": "do it", "input": "with this", "output": ""}, ("do it\n\nwith this",)),
    "cnn_dm": ({"article": "It happened.", "highlights": ""}, ("Summarize: It happened.",)),
    "natural-questions": ({"question": "who?", "answer": ["me"]}, ("who?",)),
    "wikitext-2": ({"text": " = Title = \n"}, ("= Title =",)),
    "pg-19": ({"text": "Chapter one"}, ("Chapter one",)),
} | {name: ({"turns": ["asked"]}, ("asked",)) for name in HUB if name.startswith("spec-bench")}


@pytest.mark.parametrize("name", HUB)
def test_rows_of_known_datasets_become_prompts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, config: str | None, **how: object) -> list[dict]:
        asked.append((path, config, how))
        return [ROWS[name][0]] * 200

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    prompts = load_tasks([name])
    assert asked[0][0] == HUB[name].path and asked[0][2]["streaming"] is True
    assert len(prompts) == len({prompt.id for prompt in prompts}) == tasks.HUB_ROWS
    assert len(load_tasks([name], limit=tasks.HUB_ROWS + 5)) == tasks.HUB_ROWS + 5 or name == "wikitext-2"
    assert {prompt.task for prompt in prompts} == {name}
    assert prompts[0].turns == ROWS[name][1]
    assert prompts[0].raw == (name in ("wikitext-2", "pg-19"))


def test_lines_of_wikitext_are_put_together() -> None:
    lines = [" = One = ", "", "a", " = = Part = = ", "b", " = Two = ", "c"]
    found = list(tasks.as_prompts("wikitext-2", HUB["wikitext-2"], [{"text": line} for line in lines]))
    assert [prompt.turns[0] for prompt in found] == ["= One =\na\n= = Part = =\nb", "= Two =\nc"]


def test_without_the_hub_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        InputError, match=r"pip install 'windfall\[hub\]'; or use --tasks FILE\.jsonl or --tasks builtin"
    ):
        load_tasks(["gsm8k"])

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(InputError, match=r"^cannot get task gsm8k from the hub \(no route\); connect, or use --tasks"):
        load_tasks(["gsm8k"])
