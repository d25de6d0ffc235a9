"""`windfall profile`, `calibrate` and `compare` on a tiny model."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.cli import SHORT, STATS, refused, windfall
from windfall import registry
from windfall.cli.measure import parse_policies
from windfall.engine.engine import Engine


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of this module, so that a profile is measured once."""
    place = tmp_path_factory.mktemp("profile_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINDFALL_CACHE", str(place))
        yield place


def test_profile_prints_and_saves_costs(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = windfall("profile", "--target", folder, "--drafter", "lm")
    assert shown.exit_code == 0
    for part in ("tiny", "draft pass, LMDrafter", "verify pass, context 64", "overhead of a cycle", "c = "):
        assert part in shown.stdout
    monkeypatch.setattr("windfall.engine.profiling.measure", None)  # it is not measured again
    told = windfall("profile", "--target", folder, "--drafter", "lm", "--json")
    assert set(json.loads(told.stdout)) == {"costs", "about", "full", "rounds", "seconds", "steady", "c"}
    assert len(list((cache / "profiles").iterdir())) == 1


def test_profile_plots(folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = ("profile", "--target", folder, "--drafter", "lm")
    assert refused(*at, "--plot", tmp_path / "costs.gif").startswith("a plot is a .png, .svg, .pdf file, not")
    assert refused(*at, "--plot", tmp_path / "no" / "costs.png").startswith("cannot write '")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refused(*at, "--plot", tmp_path / "costs.png") == "plots need matplotlib; run: pip install windfall[plot]"
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert windfall(*at, "--plot", tmp_path / "costs.svg").exit_code == 0
    assert "<svg" in (tmp_path / "costs.svg").read_text()


def test_policies_are_compared(folder: Path) -> None:
    options = ("--drafter", "lm", "--target", folder, "--rounds", "1", *SHORT)
    shown = windfall("compare", "abc", "--policies", "chain", *options, "--temperature", ".8")
    assert shown.exit_code == 0
    for part in ("none", "chain", "tau", "delta", "verify", "tokens/s", "speed-up", "Same 12 tokens"):
        assert part in shown.stdout
    policies = "chain, beam:depth=2:k=2,eagle-2"
    told = json.loads(windfall("compare", "abc", "--policies", policies, *options, "--json").stdout)
    assert list(told["policies"]) == ["none", "chain", "beam:depth=2:k=2", "eagle-2"]
    assert told["equal"] and told["rounds"] == 1 and len(told["token_ids"]) == 12
    for name, row in told["policies"].items():
        assert set(row) >= STATS | {"mean_rows", "speedup", "equal"}
        assert row["speedup"] == 1 if name == "none" else row["tau"] > 1
    assert told["policies"]["beam:depth=2:k=2"]["mean_rows"] <= 7


def test_rounds_take_turns_after_a_warm_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    generate = Engine.generate

    def noted(self: Engine, prompt: object, **options: object):
        turns.append((type(self.policy).__name__, options["max_new_tokens"]))
        return generate(self, prompt, **options)

    monkeypatch.setattr(Engine, "generate", noted)
    windfall("compare", "abc", "--policies", "chain,none", "--rounds", "2", "--target", folder, *SHORT)
    assert turns == [("NoSpeculation", 8), ("Chain", 8), *[("NoSpeculation", 12), ("Chain", 12)] * 2]


def test_compare_finds_a_wrong_policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = Engine.generate

    def wrong(self: Engine, prompt: object, **options: object):
        made = generate(self, prompt, **options)
        return dataclasses.replace(made, token_ids=[9]) if type(self.policy).__name__ == "Chain" else made

    monkeypatch.setattr(Engine, "generate", wrong)
    options = ("compare", "abc", "--policies", "chain", "--rounds", "1", "--target", folder, *SHORT)
    shown = windfall(*options)
    assert shown.exit_code == 1
    assert re.search(r"Different from token \d on: none has .*, chain has ", shown.stdout)
    told = windfall(*options, "--json")
    assert told.exit_code == 1 and json.loads(told.stdout)["equal"] is False


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("chain,,beam", "write --policies as names separated by commas"),
        ("nonsense", "there is no policy 'nonsense'; choose from auto"),
        ("beam:depth", "write settings as name=value, not 'depth'"),
        ("beam:depth=x", "policy beam: depth takes a whole number, not 'x'"),
    ],
)
def test_bad_policies_are_refused_in_one_line(folder: Path, policies: str, message: str) -> None:
    assert refused("compare", "abc", "--policies", policies, "--target", folder).startswith(message)


def test_all_policies_can_be_compared() -> None:
    assert set(parse_policies("all")) == set(registry.policies())


def test_calibrate_shows_reliability_before_and_after(folder: Path, tmp_path: Path) -> None:
    options = ("--target", folder, "--drafter", "lm", *SHORT)
    shown = windfall("calibrate", "abc", "cab", *options)
    assert shown.exit_code == 0
    assert shown.stdout.count("ECE") == 2
    told = json.loads(windfall("calibrate", "abc", "--json", *options).stdout)
    assert told["nodes"] > 0
    assert 0 <= told["ece_after"] <= 1
    assert sum(count for _, _, count in told["bins"]["before"]) == told["nodes"]
    silent = windfall("calibrate", "abc", "--target", folder, "--drafter", "ngram", "--max-new-tokens", "1")
    assert silent.exit_code == 2
    assert "nothing was drafted" in silent.stderr
