"""The config file, shell completion, and what the documentation says of both and of the Python API."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import windfall as library
from helpers.cli import SHORT, character_tokenizer, refused, windfall
from helpers.tiny import tiny
from windfall import registry
from windfall.bench.inspect import doctor
from windfall.cli import config_file
from windfall.core.stats import Stats
from windfall.core.types import GpuOptions, InputError, SamplingParams, Step
from windfall.engine import loading
from windfall.engine.engine import Engine, Generation

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a config file the one in use."""

    def make(text: str) -> Path:
        file = tmp_path / "own.toml"
        file.write_text(text)
        monkeypatch.setenv("WINDFALL_CONFIG", str(file))
        return file

    return make


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The words with which a command loads its engine; filled by each."""
    seen: dict[str, Any] = {}
    load, signature = loading.load, inspect.signature(loading.load)

    def note(*given: Any, **named: Any) -> Engine:
        seen.clear()
        seen.update(signature.bind(*given, **named).arguments)
        return load(*given, **named)

    monkeypatch.setattr(loading, "load", note)
    return seen


# ---- the config file


def test_the_file_gives_defaults_and_flags_win(write: Any, loaded: dict[str, Any], folder: Path) -> None:
    write(f"""
target = "{folder}"
drafter = "ngram"
drafter_options = {{ min_match = 3 }}
policy = "chain"
policy_options = {{ depth = 3, confidence = 0.25 }}
dtype = "float64"
coupled = false
graphs = false
exact = true
temperature = 0.7
seed = 5
""")
    told = json.loads(windfall("generate", "abc", "--json", *SHORT).stdout)
    assert (told["target"], told["drafter"], told["policy"], told["seed"]) == ("tiny", "ngram", "chain", 5)
    assert loaded["policy"] == registry.policy("chain", depth=3, confidence=0.25)
    assert loaded["drafter_options"] == {"min_match": "3"}
    assert (loaded["dtype"], loaded["coupled"], loaded["graphs"], loaded["exact"]) == ("float64", False, False, True)
    flags = ("--dtype", "float32", "--seed", "6", "--set", "depth=2", "--drafter-set", "max_match=5")
    told = json.loads(windfall("generate", "abc", "--json", *flags, *SHORT).stdout)
    assert (loaded["dtype"], told["seed"]) == ("float32", 6)
    assert loaded["policy"] == registry.policy("chain", depth=2, confidence=0.25)
    assert loaded["drafter_options"] == {"min_match": "3", "max_match": "5"}


def test_what_belongs_to_another_target_or_policy_is_left_out(
    write: Any,
    loaded: dict[str, Any],
    folder: Path,
) -> None:
    write("""
target = "nowhere/at-all"
drafter = "nowhere/head"
drafter_options = { vocabulary_precision = "full" }
preset = "eagle-2"
policy_options = { nodes = 9 }
""")
    windfall("generate", "abc", "--target", folder, *SHORT)
    assert loaded["target"] == str(folder)
    assert loaded["drafter"] is None and loaded["drafter_options"] == {}
    assert loaded["policy"] == registry.preset("eagle-2", nodes=9)
    windfall("generate", "abc", "--target", folder, "--policy", "chain", *SHORT)
    assert loaded["policy"] == registry.policy("chain")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle = 'x'", "has an unknown key 'modle'; it may have: target, device"),
        ("target = 5", "target must be text, not 5"),
        ("exact = 1", "exact must be true or false, not 1"),
        ("temperature = true", "temperature must be a number, not True"),
        ("top_k = 1.5", "top_k must be a whole number, not 1.5"),
        ("policy_options = 'x'", "policy_options must be a table of options, not 'x'"),
        ("policy = 'beam'\npreset = 'eagle-2'", "has a policy and a preset"),
        ("target = ", "is not valid TOML: "),
    ],
)
def test_a_wrong_file_is_refused_by_name(write: Any, text: str, message: str) -> None:
    file = write(text)
    said = refused("generate", "abc")
    assert f"the config file '{file}'" in said and message in said
    [found] = [check for check in doctor_checks() if check.name == "config file"]
    assert not found.ok and str(file) in found.detail


def test_a_file_that_is_named_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINDFALL_CONFIG", str(tmp_path / "none.toml"))
    assert (
        refused("generate", "abc") == f"cannot read the config file '{tmp_path}/none.toml': No such file or directory"
    )


def test_where_the_file_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WINDFALL_CONFIG")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    usual = tmp_path / ".config" / "windfall" / "config.toml"
    assert config_file.file_in_use() is None and config_file.read() == {}
    assert doctor.config_file() == f"none; {usual} would be read"
    usual.parent.mkdir(parents=True)
    usual.write_text("target = '~/model'\n")
    assert config_file.file_in_use() == usual and config_file.read() == {"target": str(tmp_path / "model")}
    assert doctor.config_file() == f"{usual} sets target"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    assert config_file.file_in_use() is None
    monkeypatch.setenv("WINDFALL_CONFIG", "")
    assert doctor.config_file() == "none"


def doctor_checks() -> list[doctor.Check]:
    return [doctor._check("config file", doctor.config_file)]


# ---- completion


COMPLETIONS = {
    "windfall gen": {"generate"},
    "windfall generate --policy be": {"beam"},
    "windfall generate --drafter h": {"head", "hydra"},
    "windfall chat --preset eagle-": {"eagle-1", "eagle-2", "eagle-3"},
    "windfall policies med": {"medusa"},
}


def test_the_shell_completes_names_without_torch() -> None:
    code = f"""
import contextlib, os, sys
from windfall.cli import main
sys.argv = ["windfall"]
for line in {list(COMPLETIONS)}:
    os.environ |= {{"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}}
    with contextlib.suppress(SystemExit):
        main()
    print(";")
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    environment = os.environ | {"_WINDFALL_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [{*part.split()} for part in done.stdout.split(";")[:-1]]
    assert dict(zip(COMPLETIONS, found, strict=True)) == COMPLETIONS


def test_completion_can_be_installed() -> None:
    assert {"--install-completion", "--show-completion"} <= {*re.findall(r"--[a-z-]+", windfall("--help").stdout)}


# ---- the documentation


def tables(page: str) -> dict[str, list[str]]:
    """First column of each table, by the heading before it."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^#+ ", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        rows = [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in body.splitlines() if line.startswith("| `")]
        found[title.strip(" `")] = [name for row in rows for name in row]
    return found


def properties(cls: type) -> set[str]:
    return {name for name, value in vars(cls).items() if isinstance(value, property)}


def test_every_parameter_of_load_is_documented_in_its_order() -> None:
    named = tables("python.md")["windfall.load"]
    assert sorted(named) == sorted(inspect.signature(library.load).parameters)


@pytest.mark.parametrize("record", [Generation, Step, Stats, SamplingParams, GpuOptions])
def test_every_field_is_documented(record: Any) -> None:
    fields = {f.name for f in dataclasses.fields(record)}
    inner = {"greedy", "filters", "reads_prefix", "noise_seed"} if record is SamplingParams else set()
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


def test_the_example_of_a_config_file_is_one(write: Any) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", (DOCS / "cli.md").read_text("utf-8"), re.DOTALL)
    write(example)
    assert {"target", "drafter", "policy_options"} <= {*config_file.read()}


def test_tomllib_is_there_for_every_python() -> None:
    project = config_file.tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))
    assert any(each.startswith("tomli") and "3.11" in each for each in project["project"]["dependencies"])


def test_unknown_keys_are_input_errors(write: Any) -> None:
    write("colour = 'red'")
    with pytest.raises(InputError, match="unknown key 'colour'"):
        config_file.read()
