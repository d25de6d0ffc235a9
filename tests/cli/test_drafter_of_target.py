"""Commands without --drafter use the bundled head for its model, wherever that is, and say so in their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.bundled_heads import bundle_a_head
from helpers.cli import SHORT, character_tokenizer, refused, windfall
from windfall.bench import reading
from windfall.engine import loading

UNTIMED = ("--no-timing", "--limit", "1", "--max-new-tokens", "4", "--temperature", "0", "--warm-up", "0")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the model for which a head is bundled."""
    model, folder = bundle_a_head(tmp_path / "bundled", monkeypatch), tmp_path / "model"
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def told(*arguments: object) -> Any:
    result = windfall(*arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_commands_name_the_head(own: Path, folder: Path, tmp_path: Path) -> None:
    ask = ("generate", "abc", "--json", "--policy", "chain", *SHORT)
    assert [told(*ask, "--target", each)["drafter"] for each in (own, folder)] == ["head", "ngram"]
    compared = told("compare", "abc", "--json", "--policies", "chain", "--rounds", "1", "--target", own, *SHORT)
    assert compared["drafter"] == "head"
    audit = ("audit", "--json", "--policy", "chain", "--limit", "1", "--max-new-tokens", "4", "--target", own)
    audited = told(*audit)
    assert audited["settings"]["drafter"] == "head" and [*audited["provenance"]["drafters"]] == ["head"]
    measure = ("--methods", "chain", "--no-hf", "--limit", "1", "--max-new-tokens", "4", "--temperature", "0")
    once = ("--rounds", "1", "--concurrency", "1", "--arrivals", "batch")
    assert told("bench", "throughput", "--json", "--target", own, *measure, *once)["settings"]["drafter"] == "head"


@pytest.mark.parametrize("profiled", [False, True])
def test_benchmarks_run_the_head(own: Path, tmp_path: Path, profiled: bool) -> None:
    options = ("--methods", "auto" if profiled else "chain", "--target", own, *UNTIMED)
    if profiled:
        profile = tmp_path / "profile.json"
        profile.write_text(json.dumps(told("profile", "--json", "--target", own)))
        options += ("--profile", profile)
    told("bench", "run", "--json", "--out", tmp_path / "out", *options)
    made = reading.load(tmp_path / "out")
    assert made.settings["drafter"] == "head" and "head" in made.provenance["drafters"]


def test_a_study_runs_the_head(own: Path, tmp_path: Path) -> None:
    options = ("--limit", "1", "--max-new-tokens", "4", "--no-timing")
    done = windfall("bench", "study", "talon-init", "--out", tmp_path / "out", "--target", own, *options)
    assert done.exit_code == 0, done.output
    assert reading.load(tmp_path / "out").settings["drafter"] == "head"


@pytest.mark.parametrize("command", ["run", "speed", "throughput"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", "model", "--drafter", "ngram", "--drafter-set", "colour=red"), "drafter ngram has no option"),
        (("--drafter-set", "colour=red"), "drafter head has no option 'colour'"),
        (("--target", "model", "--drafter-set", "colour"), "write settings as name=value, not 'colour'"),
    ],
)
def test_a_wrong_drafter_is_refused_before_the_target_is_loaded(
    command: str, options: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_fastest", lambda *given, **how: pytest.fail("the target was loaded"))
    said = refused("bench", command, "--out", tmp_path / "out", *options)
    assert said.startswith(message) and not (tmp_path / "out").exists()
