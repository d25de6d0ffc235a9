"""What the documentation says about the command line and the Python API."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import windfall as library
from helpers.cli import character_tokenizer
from helpers.tiny import tiny
from windfall.cli import config_file
from windfall.core.stats import Stats
from windfall.core.types import GpuOptions, SamplingParams, Step
from windfall.engine import loading
from windfall.engine.engine import Engine, Generation

DOCS = Path(__file__).parents[2] / "docs"


def tables(page: str) -> dict[str, list[str]]:
    """First column of each table, by the heading before it."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^#+ ", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        rows = [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in body.splitlines() if line.startswith("| `")]
        found[title.strip(" `")] = [name for row in rows for name in row]
    return found


def properties(cls: type) -> set[str]:
    return {name for name, value in vars(cls).items() if isinstance(value, property | cached_property)}


def test_every_parameter_of_load_is_documented_in_its_order() -> None:
    named = tables("python.md")["windfall.load"]
    assert sorted(named) == sorted(inspect.signature(library.load).parameters)


@pytest.mark.parametrize("record", [Generation, Step, Stats, SamplingParams, GpuOptions])
def test_every_field_is_documented(record: Any) -> None:
    fields = {f.name for f in dataclasses.fields(record)}
    inner = {"greedy", "filters", "reads_prefix", "needs_host", "noise_seed", "wants_logprobs"}
    inner = inner if record is SamplingParams else set()
    assert {*tables("python.md")[record.__name__]} == fields | properties(record) - inner


def test_every_public_name_is_documented() -> None:
    text = (DOCS / "python.md").read_text("utf-8")
    assert not [name for name in library.__all__ if f"`{name}" not in text and f"windfall.{name}" not in text]


def test_every_key_of_the_config_file_is_documented() -> None:
    assert {*tables("cli.md")["The config file"]} == {*config_file.keys()}


def test_the_variables_that_the_code_reads_are_documented() -> None:
    code = "\n".join(file.read_text("utf-8") for file in (DOCS.parent / "src").rglob("*.py"))
    read = {*re.findall(r"\b(?:WINDFALL|XDG)_[A-Z_]+\b", code)}
    assert read <= {*tables("cli.md")["Environment variables"]}


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text("utf-8"), re.DOTALL)


def test_the_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks after one another, on a tiny model in the place of the embedded one."""
    load, model = loading.load, tiny()

    def on_tiny(target: Any = None, *given: Any, **named: Any) -> Engine:
        named.update(device=None, dtype=None)
        if named.get("drafter") == "head":
            named.update(drafter="lm", drafter_options=None)
        return load((model, character_tokenizer()), *given, **named)

    monkeypatch.setattr(loading, "load", on_tiny)
    names: dict[str, Any] = {"model": model, "tokenizer": character_tokenizer()}
    for block in blocks():
        exec(compile(block, "python.md", "exec"), names)
    assert isinstance(names["engine"], Engine) and isinstance(names["answer"], Generation)
    assert capsys.readouterr().out
