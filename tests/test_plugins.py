"""Policies and drafters that users write, named FILE.py:CLASS or MODULE:CLASS."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import windfall
from helpers.cli import folder
from helpers.tiny import tiny
from windfall import registry
from windfall.bench.methods import parse_method, parse_policies
from windfall.bench.tune import candidates
from windfall.cli import app
from windfall.core.types import InputError
from windfall.engine import loading
from windfall.plugins import is_reference
from windfall.policies.bandit import parse_arms

__all__ = ["folder"]

POLICY = '''
from __future__ import annotations

from dataclasses import dataclass

import torch
from beside import ROOM

import windfall
from windfall.drafters.base import Drafter
from windfall.drafters.ngram import NGramDrafter
from windfall.core.types import Grow

NUMBER = 3


@dataclass
class Mine(windfall.TreePolicy):
    """A chain of my own."""

    depth: int = windfall.option(ROOM, "tokens to draft", low=1)

    def grow(self, tree, ctx):
        tip = len(tree) - 1
        return None if tip == self.depth else Grow(torch.tensor([tip]), k=1)


class Undecorated(windfall.TreePolicy):
    depth: int = windfall.option(2, "tokens to draft")


@dataclass
class Unfinished(windfall.TreePolicy):
    """Has no method of its own."""


@dataclass
class HalfADrafter(Drafter):
    """Starts, and does nothing else."""

    def start(self, prompts, hidden, dice):
        pass


@dataclass
class MyDrafter(NGramDrafter):
    """Drafts as n-grams do."""
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "beside.py").write_text("ROOM = 3\n")
    (tmp_path / "my.py").write_text(POLICY)
    (tmp_path / "broken.py").write_text("x = 1\n\nx / 0\n")
    (tmp_path / "torn.py").write_text("def (:\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "mine_as_module.py").write_text("from my import Mine\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "my.py"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def test_references_are_recognised() -> None:
    named = ("my.py:Mine", "a/b/my.py:Mine", "/a/my.py:Mine", "my:Mine", "package.my:Mine")
    assert all(map(is_reference, named))
    others = ("beam", "beam:depth=4", "owner/name", "a/b", "my.py", "cuda:1", ":Mine", "a/b:Mine", "")
    assert not any(map(is_reference, others))


def test_a_policy_in_a_file(file: Path) -> None:
    policy = registry.policy("my.py:Mine", depth="4")
    assert (type(policy).__name__, policy.depth) == ("Mine", 4)
    assert type(policy) is registry.policy_class(str(file) + ":Mine")
    assert registry.policy_class("mine_as_module:Mine").__name__ == "Mine"
    file.write_text(POLICY.replace("ROOM,", "7,"))
    assert registry.policy("my.py:Mine").depth == 7, "a file that was edited is read again"


@pytest.mark.usefixtures("file")
def test_python_takes_the_same_names() -> None:
    engine = windfall.load((tiny(), None), registry.drafter("my.py:MyDrafter"), "my.py:Mine")
    assert type(engine.policy).__name__ == "Mine"
    assert type(loading.as_drafter("my.py:MyDrafter", min_match="3")).__name__ == "MyDrafter"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.py:Mine", r"cannot read 'no\.py': No such file or directory"),
        ("my.py:Other", r"'my\.py' has no class 'Other'; its TreePolicy classes: Mine, Undecorated, Unfinished"),
        ("my.py:NUMBER", r"'NUMBER' in 'my\.py' must be a subclass of windfall\.policies\.base\.TreePolicy"),
        ("my.py:MyDrafter", r"'MyDrafter' in 'my\.py' must be a subclass of"),
        ("my.py:Undecorated", r"has the option 'depth', so it needs @dataclass"),
        ("my.py:Unfinished", r"'Unfinished' in 'my\.py' needs a method plan or grow or budget"),
        ("broken.py:Mine", r"cannot import 'broken\.py': ZeroDivisionError in line 3: division by zero"),
        ("torn.py:Mine", r"cannot import 'torn\.py': SyntaxError in line 1: "),
        ("leaving.py:Mine", r"cannot import 'leaving\.py': SystemExit in line 1: 3"),
        ("nowhere.at_all:Mine", r"cannot import 'nowhere\.at_all': ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
@pytest.mark.usefixtures("file")
def test_mistakes_are_refused_in_one_line(name: str, message: str) -> None:
    result = run("generate", "abc", "--policy", name)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(rf"windfall: [^\n]*{message}[^\n]*\n", result.stderr), result.stderr


@pytest.mark.usefixtures("file")
def test_a_drafter_without_all_methods_is_refused() -> None:
    with pytest.raises(InputError, match=r"'HalfADrafter' in 'my\.py' needs a method expand"):
        registry.drafter("my.py:HalfADrafter")


def test_a_policy_object_without_methods_is_refused() -> None:
    class Nothing(windfall.TreePolicy):
        pass

    with pytest.raises(InputError, match="the policy Nothing needs a method plan or grow"):
        windfall.load((tiny(), None), policy=Nothing()).generate([1, 2, 3], max_new_tokens=4)


def test_methods_take_them_with_settings_and_drafters(file: Path) -> None:
    (file.parent / "inner").mkdir()
    (file.parent / "inner" / "mine.py").write_text(POLICY.replace("from beside import ROOM", "ROOM = 3"))
    for text, label, policy, drafter in (
        ("my.py:Mine", "my.py:Mine", "my.py:Mine", None),
        ("my.py:Mine:depth=5", "my.py:Mine:depth=5", "my.py:Mine", None),
        (f"{file}:Mine:depth=5", "my.py:Mine:depth=5", f"{file}:Mine", None),
        ("inner/mine.py:Mine", "inner/mine.py:Mine", "inner/mine.py:Mine", None),
        ("self:skip=1/inner/mine.py:Mine", "self:skip=1/inner/mine.py:Mine", "inner/mine.py:Mine", "self:skip=1"),
        ("ngram/my.py:Mine", "ngram/my.py:Mine", "my.py:Mine", "ngram"),
        ("my.py:MyDrafter:min_match=2/beam", "my.py:MyDrafter:min_match=2/beam", "beam", "my.py:MyDrafter:min_match=2"),
        ("my.py:MyDrafter/my.py:Mine", "my.py:MyDrafter/my.py:Mine", "my.py:Mine", "my.py:MyDrafter"),
        ("ngram/mine_as_module:Mine", "ngram/mine_as_module:Mine", "mine_as_module:Mine", "ngram"),
    ):
        method = parse_method(text)
        assert (method.label, method.policy) == (label, policy)
        assert (method.drafter and method.drafter.label) == drafter
        assert method.make().depth == (5 if "depth=5" in text else 6 if policy == "beam" else 3)
    for text in ("no/such.py:Mine", "ngram/no/such.py:Mine"):
        with pytest.raises(InputError, match=r"cannot read 'no/such\.py'"):
            parse_method(text)
    with pytest.raises(InputError, match="write settings as name=value, not 'depth'"):
        parse_method("beam:depth")


@pytest.mark.usefixtures("file")
def test_every_option_for_policies_takes_references() -> None:
    assert list(parse_policies("my.py:Mine,beam")) == ["none", "my.py:Mine", "beam"]
    assert {settings["depth"] for settings in candidates("my.py:Mine", "halving", (), 4, 0, {})}
    assert list(parse_arms("my.py:Mine:depth=2+beam")) == ["none", "my.py:Mine:depth=2", "beam"]
    told = json.loads(run("policies", "my.py:Mine", "--json").stdout)
    assert told["policies"][0]["summary"] == "A chain of my own."
    assert [each["name"] for each in told["policies"][0]["options"]] == ["depth"]


@pytest.mark.usefixtures("file")
def test_the_commands_run_them(folder: Path, tmp_path: Path) -> None:
    short = ("--target", folder, "--max-new-tokens", 8, "--ignore-eos")
    plain = run("generate", "abc", *short, "--policy", "none")
    mine = run("generate", "abc", *short, "--policy", "my.py:Mine", "--set", "depth=2", "--drafter", "my.py:MyDrafter")
    assert (mine.exit_code, mine.stdout) == (0, plain.stdout)
    assert run("tree", "abc", *short, "--policy", "my.py:Mine").exit_code == 0
    raced = run("compare", "abc", *short, "--policies", "my.py:Mine:depth=2", "--rounds", 1, "--json")
    assert list(json.loads(raced.stdout)["policies"]) == ["none", "my.py:Mine:depth=2"]
    (tmp_path / "asked.jsonl").write_text('{"turns": ["abc"]}\n')
    bench = ("--target", folder, "--tasks", "asked.jsonl", "--max-new-tokens", 4, "--repeats", 1, "--warm-up", 0)
    made = run("bench", "run", "--out", "run", "--methods", f"{tmp_path}/my.py:Mine", *bench, "--json")
    assert made.exit_code == 0, made.output
    assert [row["policy"] for row in json.loads(made.stdout)["rows"]] == ["none", "my.py:Mine"]
