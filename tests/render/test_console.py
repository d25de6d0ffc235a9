"""Output in terminals of several widths: tables drop columns, names and sentences stay complete."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.bench_records import METHODS, write_run
from windfall.bench.reading import load
from windfall.bench.results import Row, summary
from windfall.bench.tune import Result
from windfall.cli import app, bench, diagnose, tune
from windfall.core.stats import Stats
from windfall.core.types import Split
from windfall.costs.curves import Costs, Curve
from windfall.render import console
from windfall.render.tables import Figures

WIDTHS = (40, 60, 80, 120)
LONG = "self:skip=3+5/beam:depth=4:nodes=60"
STATS = Stats(128, 40, 160, 2400, 2.5, 0.1, 0.1, Split(0.5, 1.0, 0.1, 0.2))


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def windfall(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def squeezed(text: str) -> str:
    """Without white space, so that it does not matter where lines were broken."""
    return re.sub(r"\s", "", text)


def check(text: str, width: int) -> None:
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def first_column(text: str, place: int) -> str:
    """The left edge of a table, with names that were folded put together."""
    return squeezed("".join(line[:place] for line in text.splitlines()))


def test_narrow_tables_keep_names_and_drop_columns(width: int) -> None:
    table = Figures(("method", "one figure", "another", "a third", "the last"), least=("another", "one figure"))
    for name in ("none", LONG):
        table.add(name, "1.00 (0.95–1.05)", "22.2", "333.3", "4.44 (4.00–5.00)")
    out = console.stdout()
    with out.capture() as captured:
        out.print(table)
    text = captured.get()
    check(text, width)
    assert LONG in first_column(text, table.layout(width).widths[0])
    assert "4.44" in text
    told = " ".join(text.partition("too narrow for:")[2].split())
    assert told == ("one figure, another" if width == 40 else "")
    assert ("22.2" in text) == (width > 40)


def test_nothing_is_left_out_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Figures(("method", *(f"figure {place}" for place in range(30))))
    table.add(LONG * 3, *map(str, range(30)))
    out = console.stdout()
    with out.capture() as captured:
        out.print(table)
    assert LONG * 3 in captured.get()
    assert "figure 29" in captured.get()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """The results of a benchmark; computing their confidence intervals takes a second."""
    folder = tmp_path_factory.mktemp("bench") / "run"
    return summary(load(write_run(folder, methods={**METHODS, LONG: METHODS["beam"]}, texts=2)))


def test_bench_show(width: int, results: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    for temperature in sorted({row.temperature for row in results}):
        rows = [row for row in results if row.temperature == temperature]
        console.stdout().print(bench.table(rows, temperature))
    text = capsys.readouterr().out
    check(text, width)
    for name in ("none", "salf", "talon"):
        assert len(re.findall(rf"^{name} .* \d\.\d\d \(\d\.\d\d–\d\.\d\d\)", text, re.M)) == 8
    assert squeezed(text.partition("──\n")[2]).count("self:skip=3") == 8


def test_compare(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    console.print_policy_stats({"none": STATS, LONG: replace(STATS, seconds=1.0)})
    text = capsys.readouterr().out
    check(text, width)
    assert re.search(r"^none .* 1\.00x", text, re.M)
    assert re.search(r"^self:skip=3.* 2\.50x", text, re.M)
    assert ("too narrow" in text) == (width < 80)


def test_a_comparison_with_plain_decoding(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    console.stdout().print(console.stats_table({"plain": STATS, "auto": STATS}, baseline=STATS))
    text = capsys.readouterr().out
    check(text, width)
    assert re.search(r"^auto +128 .* 1\.00x", text, re.M)


def test_profile(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    curves = tuple((length, Curve((1, 8, 64), (0.01, 0.02, 0.05))) for length in (0, 512, 1024, 4096))
    about = {
        "machine": {"gpu": None, "cpu": "a CPU", "threads": 2},
        "target": {"name": "tiny", "dtype": "torch.float32"},
        "drafter": {"class": "windfall.drafters.feature_head.FeatureHeadDrafter"},
    }
    costs = Costs(Curve((1, 8), (0.001, 0.002)), curves, 0.0001)
    console.print_costs(costs, about, rounds=3)
    text = capsys.readouterr().out
    tables = text.partition("\n")[2].partition("overhead")[0]
    check(tables, width)
    assert len(re.findall(r"^ *(?:1|8|64) +\d", tables, re.M)) == 5
    assert len(re.findall(r"^ *64(?: +50)+", tables, re.M)) == 1


def test_tune(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"depth": 4, "k": 10, "nodes": 60, "threshold": 0.25, "schedule": "heuristic"}
    tune._show([Result(settings, 8, 123.4)], Path("tuned.json"), json=False)
    text = capsys.readouterr().out
    check(text, width)
    assert "123.4" in text
    figures = "8123.4" if width > 40 else "123.4"
    for name, value in settings.items():
        assert f"{name}={value}" in squeezed(text.partition("──\n")[2]).replace(figures, "")


def test_diagnose(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    diagnose._print_table("Target passes by depth and rank", ["depth", *map(str, range(1, 21))], [["3", *["100"] * 20]])
    text = capsys.readouterr().out
    check(text, width)
    assert re.search(r"^ +3 +100", text, re.M)
    assert ("too narrow" in text) == (width < 120)


@pytest.fixture(scope="module")
def catalogue() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(windfall("policies", "--json"))
    return found


def test_policies_are_listed_with_every_option(
    width: int, catalogue: dict[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    for title, entries in catalogue.items():
        console.print_catalogue(title, entries)
    text = capsys.readouterr().out
    check(text, width)
    for entry in catalogue["policies"]:
        for each in entry["options"]:
            assert squeezed(each["help"]) in squeezed(text), each
    assert "NoneType" not in text
    assert "floatornone" in squeezed(text)


def test_checks_are_wrapped(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    detail = "speculative = plain = transformers on a tiny random model, in /a/folder/with-a-name-of-forty-characters"
    console.print_checks([{"name": "same text", "detail": detail, "ok": True, "needed": True}])
    text = capsys.readouterr().out
    check(text, width)
    assert text.startswith("✓ same text ")
    assert squeezed(detail) in squeezed(text).removeprefix("✓sametext")


@pytest.mark.parametrize("command", ["generate", "train head", "bench run", "tune"])
def test_help_names_every_option(width: int, command: str) -> None:
    text = windfall(*command.split(), "--help")
    check(text, width)
    assert "<bool>" not in text
    for option in {"generate": ["--raw", "--repetition-penalty"], "train head": ["--validation-batches"]}.get(
        command, ["--trust-remote-code"]
    ):
        assert re.search(rf"{option}\b", text)
