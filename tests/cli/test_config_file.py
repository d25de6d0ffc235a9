"""The config file."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import SHORT, refused, windfall
from windfall import registry
from windfall.bench.inspect import doctor
from windfall.cli import config_file
from windfall.engine import loading
from windfall.engine.engine import Engine

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


def test_the_file_sets_defaults_and_flags_override_it(write: Any, loaded: dict[str, Any], folder: Path) -> None:
    write(f"""
target = "{folder}"
drafter = "ngram"
drafter_options = {{ min_match = 3 }}
policy = "chain"
policy_options = {{ depth = 3, confidence = 0.25 }}
dtype = "float64"
coupled = false
graphs = false
fast = true
temperature = 0.7
seed = 5
""")
    told = json.loads(windfall("generate", "abc", "--json", *SHORT).stdout)
    assert (told["target"], told["drafter"], told["policy"], told["seed"]) == ("tiny", "ngram", "chain", 5)
    assert loaded["policy"] == registry.policy("chain", depth=3, confidence=0.25)
    assert loaded["drafter_options"] == {"min_match": "3"}
    assert (loaded["dtype"], loaded["coupled"], loaded["graphs"], loaded["exact"]) == ("float64", False, False, False)
    flags = ("--dtype", "float32", "--seed", "6", "--set", "depth=2", "--drafter-set", "max_match=5")
    told = json.loads(windfall("generate", "abc", "--json", *flags, *SHORT).stdout)
    assert (loaded["dtype"], told["seed"]) == ("float32", 6)
    assert loaded["policy"] == registry.policy("chain", depth=2, confidence=0.25)
    assert loaded["drafter_options"] == {"min_match": "3", "max_match": "5"}


@pytest.mark.parametrize(
    ("text", "flags", "exact"),
    [
        ("", [], True),
        ("", ["--exact"], True),
        ("", ["--fast"], False),
        ("fast = true", [], False),
        ("fast = false", [], True),
        ("exact = true", [], True),  # as in version 0.2
        ("exact = false", [], False),
        ("fast = true", ["--exact"], True),
        ("exact = true", ["--fast"], False),
        ("exact = false", ["--exact"], True),
    ],
)
def test_passes_are_exact_unless_the_file_or_a_flag_says_otherwise(
    write: Any, loaded: dict[str, Any], folder: Path, text: str, flags: list[str], exact: bool
) -> None:
    write(text)
    windfall("generate", "abc", "--target", folder, *flags, *SHORT)
    assert loaded["exact"] is exact


def test_settings_of_another_target_or_policy_are_ignored(
    write: Any,
    loaded: dict[str, Any],
    folder: Path,
) -> None:
    write("""
target = "nowhere/at-all"
drafter = "nowhere/head"
drafter_options = { weights = "full" }
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
        ("fast = 1", "fast must be true or false, not 1"),
        ("exact = 1", "exact must be true or false, not 1"),
        ("exact = true\nfast = false", "has exact and fast, which say the opposite: keep one"),
        ("temperature = true", "temperature must be a number, not True"),
        ("top_k = 1.5", "top_k must be a whole number, not 1.5"),
        ("policy_options = 'x'", "policy_options must be a table of options, not 'x'"),
        ("policy = 'beam'\npreset = 'eagle-2'", "has a policy and a preset"),
        ("target = ", "is not valid TOML: "),
    ],
)
def test_a_wrong_file_is_refused(write: Any, text: str, message: str) -> None:
    file = write(text)
    said = refused("generate", "abc")
    assert f"the config file '{file}'" in said and message in said
    [found] = [check for check in doctor_checks() if check.name == "config file"]
    assert not found.ok and str(file) in found.detail


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy_options = { colour = 'red' }", "policy_options: policy chain has no option 'colour'; it has: depth"),
        ("policy_options = { depth = 'deep' }", "policy_options: policy chain: depth takes a whole number, not 'deep'"),
        ("policy_options = { depth = 0 }", "policy_options: depth must be at least 1, not 0"),
        ("drafter_options = { colour = 'red' }", "drafter_options: drafter ngram has no option 'colour'; it has: "),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--set", "confidence=0.5", "--drafter-set", "max_match=4"]])
def test_wrong_options_in_the_file_are_refused_with_its_name(
    write: Any, folder: Path, text: str, message: str, flags: list[str]
) -> None:
    file = write(f"target = '{folder}'\ndrafter = 'ngram'\npolicy = 'chain'\n{text}")
    assert refused("generate", "abc", *flags).startswith(f"the config file '{file}', {message}")


def test_a_wrong_flag_is_not_blamed_on_the_file(write: Any, folder: Path) -> None:
    write("policy = 'chain'\npolicy_options = { depth = 3 }")
    assert refused("generate", "abc", "--set", "depth=0") == "depth must be at least 1, not 0"
    assert refused("generate", "abc", "--set", "depth") == "write settings as name=value, not 'depth'"


def test_a_missing_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINDFALL_CONFIG", str(tmp_path / "none.toml"))
    assert (
        refused("generate", "abc") == f"cannot read the config file '{tmp_path}/none.toml': No such file or directory"
    )


def test_the_place_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WINDFALL_CONFIG")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    usual = tmp_path / ".config" / "windfall" / "config.toml"
    assert config_file.file_in_use() is None and config_file.read() == {}
    assert config_file.describe() == f"none; {usual} would be read"
    usual.parent.mkdir(parents=True)
    usual.write_text("target = '~/model'\n")
    assert config_file.file_in_use() == usual and config_file.read() == {"target": str(tmp_path / "model")}
    assert config_file.describe() == f"{usual} sets target"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    assert config_file.file_in_use() is None
    monkeypatch.setenv("WINDFALL_CONFIG", "")
    assert config_file.describe() == "none"


def doctor_checks() -> list[doctor.Check]:
    return [doctor._check("config file", config_file.describe)]


def test_the_example_of_a_config_file_is_one(write: Any) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", (DOCS / "cli.md").read_text("utf-8"), re.DOTALL)
    write(example)
    assert {"target", "drafter", "policy_options"} <= {*config_file.read()}


def test_every_python_has_a_toml_reader() -> None:
    project = config_file.tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))
    assert any(each.startswith("tomli") and "3.11" in each for each in project["project"]["dependencies"])
