"""Plain decoding that something else slowed down, in made-up records: no page may show its speed-ups as figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from helpers.bench_records import METHODS, write_run
from windfall.bench import reading, results
from windfall.bench.disturbance import Disturbance, disturbances
from windfall.bench.report import page, parts, results_page
from windfall.cli import app
from windfall.costs.curves import Costs

FEW = {name: METHODS[name] for name in ("none", "beam")}
STEP = 0.021  # seconds of a plain cycle in made-up records, about


def change(folder: Path, slow: Callable[[dict[str, Any]], float]) -> None:
    """Make answers slower: `slow` says how many times, of a record."""
    file = folder / "records.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        for turn in record["turns"]:
            turn["seconds"] = turn["prefill"] + slow(record) * (turn["seconds"] - turn["prefill"])
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def profiled(folder: Path, step: float = STEP) -> None:
    """Give the run a profile that says what a plain step costs."""
    about = json.loads((folder / "run.json").read_text())
    costs = Costs.simple(0.002, (1, 64), (step - 0.001, 2 * step), overhead=0.001)
    about["profiles"] = {"ngram": {"costs": costs.as_dict(), "c": 0.1, "rounds": 3, "steady": True}}
    (folder / "run.json").write_text(json.dumps(about))


def found(folder: Path) -> list[Disturbance]:
    run = reading.load(folder)
    return disturbances(run, results.summary(run))


def slowed(times: float, temperature: float = 0.0) -> Callable[[dict[str, Any]], float]:
    return lambda record: times if (record["method"], record["temperature"]) == ("none", temperature) else 1.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "made-up", methods=FEW, texts=3)


def test_an_undisturbed_run_has_no_warning(folder: Path) -> None:
    assert found(folder) == []
    profiled(folder)
    assert found(folder) == []


def test_plain_steps_are_compared_with_the_profile(folder: Path) -> None:
    profiled(folder)
    change(folder, slowed(3.1))
    (told,) = found(folder)
    assert told.temperature == 0.0
    assert told.factor == pytest.approx(3.1, rel=0.1)
    assert told.warning.startswith("plain decoding was disturbed: its steps took 3.")
    assert told.warning.endswith(" times what the profile says; speed-ups are not to be believed")


def test_the_slowest_profile_counts(folder: Path) -> None:
    profiled(folder, 3 * STEP)
    change(folder, slowed(2.0))
    assert found(folder) == []


def test_a_few_slow_conversations_are_noticed_without_a_profile(folder: Path) -> None:
    change(folder, lambda record: 8.0 if (record["method"], record["id"]) == ("none", "code-1") else 1.0)
    heats = {each.temperature: each for each in found(folder)}
    assert set(heats) == {0.0, 1.0}
    assert "times what they took in its median conversation" in heats[0.0].warning
    assert heats[0.0].factor == pytest.approx(1 + 7 / 9, rel=0.05)


def test_a_speed_up_beyond_tokens_per_pass_is_noticed(folder: Path) -> None:
    change(folder, slowed(9.0, temperature=1.0))
    (told,) = found(folder)
    assert told.temperature == 1.0
    assert "beam's speed-up of " in told.warning
    assert "tokens per pass allow" in told.warning


def test_untimed_and_damaged_runs_have_no_warning(folder: Path) -> None:
    profiled(folder)
    about = json.loads((folder / "run.json").read_text())
    about["profiles"]["ngram"]["costs"] = {}
    (folder / "run.json").write_text(json.dumps(about))
    assert found(folder) == []
    text = (folder / "records.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    for record in records:
        for turn in record["turns"]:
            turn["seconds"] = turn["split"] = None
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert found(folder) == []


def test_large_figures_have_intervals(folder: Path) -> None:
    run = reading.load(folder)
    gain = next(row.speedup for row in results.summary(run) if (row.method, row.task) == ("beam", reading.ALL))
    assert gain is not None
    (tile, what), *_ = page.make(folder).facts
    assert tile == f"{gain.value:.2f}×"
    assert what == f"speed-up of beam, temperature 0 (95% interval {gain.low:.2f} to {gain.high:.2f})"


def test_no_page_shows_the_speed_ups_of_a_disturbed_run(folder: Path, tmp_path: Path) -> None:
    change(folder, slowed(9.0))
    made = page.make(folder)
    (warning,) = (each.warning for each in found(folder))
    assert made.facts[0] == ("disturbed", f"temperature 0: {warning}")
    assert made.facts[1][0].endswith("×"), "the other temperature is believed"
    assert f"At temperature 0 {warning}." in made.summary
    assert not any("At temperature 0 beam was fastest" in line for line in made.summary)
    assert made.sections[0].text.startswith(f"P{warning[1:]}.\n\n")
    drawn = {drawing.name: "<svg/>" for section in made.sections for drawing in section.drawings}
    assert "<li><b>disturbed</b>" in parts.as_html(made, drawn)
    several = results_page.make([folder], "page.md")
    assert f"In made-up, at temperature 0, {warning}." in several.summary


def test_bench_show_prints_the_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    change(folder, slowed(9.0))
    (told,) = found(folder)
    shown = CliRunner().invoke(app, ["bench", "show", str(folder)])
    assert f"At temperature 0 {told.warning}\n" in shown.stdout
    data = json.loads(CliRunner().invoke(app, ["bench", "show", str(folder), "--json"]).stdout)
    assert data["disturbed"] == [json.loads(json.dumps(told._asdict()))]
