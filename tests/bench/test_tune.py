"""Tuning: the search finds the fastest, keeps what it measured, and its file is a preset."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.cli import character_tokenizer
from helpers.tiny import tiny
from windfall import registry
from windfall.bench import tune
from windfall.cli import app
from windfall.core.options import build, options_of
from windfall.core.types import InputError


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


def test_a_grid_of_given_values() -> None:
    values = tune.parse_values(["depth=6,8", "nodes=40,60,80"])
    chosen = tune.candidates("beam", "grid", (), 0, 0, {"k": "4"}, values)
    assert len(chosen) == 6 and chosen[0] == {"depth": 6, "nodes": 40} and chosen[-1] == {"depth": 8, "nodes": 80}
    assert tune.parse_values(["th=0.5,1", "history=none"]) == {"th": (0.5, 1), "history": ("none",)}
    for message, how in (
        ("write values as NAME=A,B,C", lambda: tune.parse_values(["depth"])),
        ("write values as NAME=A,B,C", lambda: tune.parse_values(["=6"])),
        ("values of 'depth' at once", lambda: tune.parse_values(["depth=6", "depth=8"])),
        ("--search grid", lambda: tune.candidates("beam", "halving", (), 4, 0, {}, values)),
        ("both stay as it is", lambda: tune.candidates("beam", "grid", (), 0, 0, {"depth": "6"}, values)),
        ("has no option 'width'", lambda: tune.candidates("beam", "grid", (), 0, 0, {}, {"width": (1, 2)})),
    ):
        with pytest.raises(InputError, match=message):
            how()


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
    chosen = tune.random_settings(policy, count=6)
    assert chosen == tune.random_settings(policy, count=6) and len(chosen) <= 6
    for settings in chosen:
        build(registry.policy_class(policy), settings, policy)
    defaults = build(registry.policy_class(policy), {}, policy)
    assert all(getattr(defaults, name) == value for name, value in chosen[0].items())


def test_what_cannot_be_searched_is_refused() -> None:
    for words, reason in (
        (("beam", "grid", ("k",)), "the grid is over depth and nodes"),
        (("salf", "grid", ()), "'depth'"),
        (("beam", "dice", ()), "choose from grid, halving"),
        (("beam", "halving", ("width",)), "no option 'width' to search over; it has: depth, k, nodes"),
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


def test_switches_and_choices_are_searched_where_they_are_named() -> None:
    chosen = tune.candidates("dynatree", "halving", ("history", "root_branching", "tau"), 20, 0, {})
    assert chosen[0] == {"history": "paper", "root_branching": False, "tau": 0.05} and len(chosen) == 20
    assert {each["history"] for each in chosen} == {"paper", "release", "none"}
    assert {each["root_branching"] for each in chosen} == {True, False}
    assert "history" not in tune.candidates("dynatree", "halving", (), 2, 0, {})[0]
    few = tune.candidates("dynatree", "halving", ("root_branching",), 20, 0, {})
    assert few == [{"root_branching": False}, {"root_branching": True}]


def test_halving_goes_over_a_policys_own_fields(tmp_path: Path) -> None:
    """The whole way from a policy's options to a preset: the best of what was drawn, written and read again."""
    speeds = {"paper": 1.0, "release": 3.0, "none": 2.0}
    chosen = tune.candidates("dynatree", "halving", ("history", "base_depth"), 24, 1, {"nodes": "40"})
    search = tune.Search.open(tmp_path / "s", {})
    found = tune.halving(search, chosen, 8, lambda own, _: speeds[own["history"]] - 0.1 * own["base_depth"], nothing)
    best = max(chosen, key=lambda own: speeds[own["history"]] - 0.1 * own["base_depth"])
    assert found[0].settings == best and found[0].prompts == 8
    tune.write_preset(tmp_path / "p.json", "dynatree", {"nodes": "40"}, found[0], {})
    made = registry.preset(str(tmp_path / "p.json"))
    assert (made.history, made.base_depth, made.nodes) == (best["history"], best["base_depth"], 40)


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
        with pytest.raises(InputError, match="not a preset file"):
            registry.preset(str(file))


def test_the_command_writes_what_generate_reads(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "tuned.json"
    tiny().save_pretrained(model)
    character_tokenizer().save_pretrained(model)
    (tmp_path / "t.jsonl").write_text('{"id": "1", "turns": ["count to ten"]}\n', "utf-8")
    how = ["--target", str(model), "--drafter", "self"]
    words = ["tune", *how, "--policy", "chain", "--vary", "depth", "--candidates", "3", "--out", str(out), "--json"]
    words += ["--search", "halving"]
    result = CliRunner().invoke(app, [*words, "--tasks", str(tmp_path / "t.jsonl"), "--max-new-tokens", "6"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["results"]
    best = json.loads(out.read_text("utf-8"))
    assert best["policy"] == "chain" and best["settings"] == found[0]["settings"] and len(found) == 3
    assert str(tmp_path) not in out.read_text("utf-8") and best["about"]["machine"]["threads"]
    other = CliRunner().invoke(app, [*words, "--tasks", str(tmp_path / "t.jsonl"), "--dtype", "bfloat16"])
    assert other.exit_code == 2 and "a search with another" in other.stderr
    assert "is a folder" in CliRunner().invoke(app, [*words, "--out", str(tmp_path)]).stderr
    (tmp_path / "mine.json").write_text('{"type": "object"}', "utf-8")
    kept = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "mine.json")])
    assert kept.exit_code == 2 and "is not a result of `windfall tune`; choose another --out" in kept.stderr
    wrong = CliRunner().invoke(app, [*words, "--values", "depth=2,3", "--out", str(tmp_path / "new" / "t.json")])
    assert wrong.exit_code == 2 and not (tmp_path / "new").exists()
    told = CliRunner().invoke(app, ["generate", "sing", *how, "--preset", str(out), "--max-new-tokens", "6", "--json"])
    assert told.exit_code == 0 and json.loads(told.stdout)["policy"] == str(out)
