"""Tuning: the search finds the fastest, keeps what it measured, and its file is a preset."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from test_cli import character_tokenizer
from tiny import tiny
from windfall import registry
from windfall.bench import tune
from windfall.cli import app
from windfall.options import build, options_of
from windfall.records import InputError


class Speeds:
    """A measurement that is faster the nearer `depth` is to 7, and counts how often it was made."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], int]] = []

    def __call__(self, settings: dict[str, Any], prompts: int) -> float:
        self.asked.append((settings, prompts))
        return 100.0 - abs(settings["depth"] - 7)


def nothing(share: float) -> None:
    pass


def test_the_grid_is_every_depth_with_every_size(tmp_path: Path) -> None:
    chosen = tune.candidates("beam", "grid", (), 0, 0, {})
    assert (
        len(chosen) == 9 * 11 and chosen[0] == {"depth": 4, "nodes": 40} and chosen[-1] == {"depth": 12, "nodes": 240}
    )
    search, speeds = tune.Search.open(tmp_path / "s", {}), Speeds()
    found = tune.sweep(search, chosen, 2, speeds, nothing)
    assert len(speeds.asked) == 99 and {result.settings["depth"] for result in found[:11]} == {7}


@pytest.mark.parametrize(("candidates", "prompts"), [(16, 8), (5, 3), (2, 1), (7, 100)])
def test_halving_ends_with_every_prompt(candidates: int, prompts: int) -> None:
    rounds = list(tune.plan(candidates, prompts))
    assert rounds[0][0] == candidates and rounds[-1][1] == prompts and rounds[-1][0] <= 3
    assert all(a >= b and x <= y for (a, x), (b, y) in pairwise(rounds))


def test_halving_finds_the_fastest_with_less_work(tmp_path: Path) -> None:
    chosen, speeds = [{"depth": depth} for depth in range(1, 17)], Speeds()
    found = tune.halving(tune.Search.open(tmp_path / "s", {}), chosen, 8, speeds, nothing)
    assert found[0].settings == {"depth": 7} and found[0].prompts == 8
    assert sum(prompts for _, prompts in speeds.asked) <= 16 * 8 / 2
    assert sorted(result.settings["depth"] for result in found) == list(range(1, 17))


def test_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    file, chosen = tmp_path / "s", [{"depth": depth} for depth in range(1, 9)]
    speeds = Speeds()

    def stops(settings: dict[str, Any], prompts: int) -> float:
        if len(speeds.asked) == 5:
            raise KeyboardInterrupt
        return speeds(settings, prompts)

    with pytest.raises(KeyboardInterrupt):
        tune.halving(tune.Search.open(file, {"policy": "beam"}), chosen, 4, stops, nothing)
    again = Speeds()
    found = tune.halving(tune.Search.open(file, {"policy": "beam"}), chosen, 4, again, nothing)
    assert not [each for each in again.asked if each in speeds.asked] and found[0].settings == {"depth": 7}
    with pytest.raises(InputError, match="another policy"):
        tune.Search.open(file, {"policy": "salf"})
    file.write_text("[]", "utf-8")
    with pytest.raises(InputError, match="not the file of a search"):
        tune.Search.open(file, {})


def has_numbers(policy: str) -> bool:
    return any(type(option.default) in (int, float) for option in options_of(registry.policy_class(policy)).values())


WITH_NUMBERS = [name for name in registry.policies() if has_numbers(name)]


@pytest.mark.parametrize("policy", WITH_NUMBERS)
def test_random_settings_are_allowed(policy: str) -> None:
    chosen = tune.field_of(policy, count=12)
    assert chosen == tune.field_of(policy, count=12) and len(chosen) <= 12
    for settings in chosen:
        build(registry.policy_class(policy), settings, policy)
    defaults = build(registry.policy_class(policy), {}, policy)
    assert all(getattr(defaults, name) == value for name, value in chosen[0].items())


def test_what_cannot_be_searched_is_refused() -> None:
    for words, reason in (
        (("beam", "grid", ("k",)), "the grid is over depth and nodes"),
        (("salf", "grid", ()), "'depth'"),
        (("beam", "dice", ()), "choose from grid, halving"),
        (("beam", "halving", ("width",)), "no number 'width'"),
        (("none", "halving", ()), "no numbers"),
    ):
        with pytest.raises(InputError, match=reason):
            tune.candidates(*words, 4, 0, {})


def test_fixed_options_are_not_searched() -> None:
    assert all(set(each) == {"nodes"} for each in tune.candidates("beam", "grid", (), 0, 0, {"depth": "5"}))
    with pytest.raises(InputError, match="'depth' cannot both stay"):
        tune.candidates("beam", "halving", ("depth",), 4, 0, {"depth": "5"})
    with pytest.raises(InputError, match="has no option 'width'"):
        tune.candidates("beam", "grid", (), 0, 0, {"width": "5"})
    assert all("k" not in each for each in tune.candidates("beam", "halving", (), 4, 0, {"k": "3"}))


def test_a_preset_file_is_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    tune.write_preset(file, "beam", {"k": "3"}, tune.Result({"depth": 4}, 12.5, 8), {"target": "tiny"})
    made = registry.preset(str(file), nodes=20)
    assert (made.depth, made.k, made.nodes) == (4, 3, 20)
    assert json.loads(file.read_text("utf-8"))["tokens_per_second"] == 12.5
    with pytest.raises(InputError, match="cannot read"):
        registry.preset(str(tmp_path / "other.json"))
    for text in ("{", "[]", '{"policy": "beam"}'):
        file.write_text(text, "utf-8")
        with pytest.raises(InputError, match="no preset"):
            registry.preset(str(file))


def test_the_command_writes_what_generate_reads(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "tuned.json"
    tiny().save_pretrained(model)
    character_tokenizer().save_pretrained(model)
    (tmp_path / "t.jsonl").write_text('{"id": "1", "turns": ["count to ten"]}\n', "utf-8")
    how = ["--target", str(model), "--drafter", "self"]
    words = ["tune", *how, "--policy", "chain", "--vary", "depth", "--candidates", "3", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, [*words, "--tasks", str(tmp_path / "t.jsonl"), "--max-new-tokens", "6"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["results"]
    best = json.loads(out.read_text("utf-8"))
    assert best["policy"] == "chain" and best["settings"] == found[0]["settings"] and len(found) == 3
    assert str(tmp_path) not in out.read_text("utf-8") and best["about"]["machine"]["threads"]
    other = CliRunner().invoke(app, [*words, "--tasks", str(tmp_path / "t.jsonl"), "--dtype", "bfloat16"])
    assert other.exit_code == 2 and "a search with another" in other.stderr
    assert "is a folder" in CliRunner().invoke(app, [*words, "--out", str(tmp_path)]).stderr
    told = CliRunner().invoke(app, ["generate", "sing", *how, "--preset", str(out), "--max-new-tokens", "6", "--json"])
    assert told.exit_code == 0 and json.loads(told.stdout)["policy"] == str(out)
