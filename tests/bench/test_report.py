"""Reports of made-up runs: what a page says is what the records say, and it needs nothing from outside."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from helpers.bench_records import METHODS, TASKS, write_run
from helpers.tiny import prompt, tiny
from windfall.bench import reading, results
from windfall.bench.report import page as report
from windfall.bench.report import results_page
from windfall.cli import app
from windfall.core.types import InputError
from windfall.engine import loading

FEW = {name: METHODS[name] for name in ("none", "beam", "salf")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its report."""
    place = write_run(tmp_path_factory.mktemp("runs") / "made-up")
    (place / "trees").mkdir()
    (place / "trees" / "beam.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><text id="a">x &lt; y</text></svg>\n', "utf-8"
    )
    report.write(place)
    return place


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[results.Row]:
    return results.summary(reading.load(folder))


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text("utf-8")


class Cells(HTMLParser):
    """The tables of a page, by the heading before them."""

    def __init__(self, page: str):
        super().__init__()
        self.tables: dict[str, list[list[str]]] = defaultdict(list)
        self.heading, self.inside = "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        if tag in ("h2", "h3", "summary"):
            self.heading, self.inside = "", "heading"
        elif tag == "tr":
            self.tables[self.heading].append([])
        elif tag in ("td", "th"):
            self.tables[self.heading][-1].append("")
            self.inside = "cell"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h2", "h3", "summary", "td", "th"):
            self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "heading":
            self.heading += data
        elif self.inside == "cell":
            self.tables[self.heading][-1][-1] += data


def test_the_page_says_what_the_records_say(rows: list[results.Row], page: str) -> None:
    tables = Cells(page).tables
    for heat, name in ((0.0, "temperature 0 (greedy)"), (1.0, "temperature 1")):
        overall = {line[0]: line for line in tables[f"All tasks, {name}"]}
        assert set(overall) == {"method", *METHODS}
        for row in (each for each in rows if each.task == reading.ALL and each.temperature == heat):
            assert row.speedup is not None and row.split is not None and row.tokens_per_second is not None
            line = overall[row.method]
            speed = f"{row.speedup.value:.2f} [{row.speedup.low:.2f}, {row.speedup.high:.2f}]"
            assert line[1] == (speed if row.method != "none" else "1.00")
            shown = [f"{row.tokens_per_second:.1f}", f"{row.tau:.2f}", f"{row.delta:.2f}", f"{row.rows:.1f}"]
            assert line[2:6] == shown
            assert line[6] == f"{100 * row.split['draft']:.0f}%"
            assert line[10] == ("–" if row.method == "none" else f"{row.samples}/{row.samples}")


def test_tasks_have_their_own_figures(rows: list[results.Row], page: str) -> None:
    greedy = {(r.method, r.task): r for r in rows if r.temperature == 0}
    by_task = {line[0]: line[1:] for line in Cells(page).tables["tau by task, in numbers"][: len(METHODS) + 1]}
    assert by_task["method"] == list(TASKS)
    assert by_task["talon"] == [f"{greedy['talon', task].tau:.2f}" for task in TASKS]


def test_the_winner_is_named_with_its_interval(rows: list[results.Row], page: str) -> None:
    greedy = [r for r in rows if r.task == reading.ALL and r.temperature == 0]
    best = max((r for r in greedy if r.method != "none"), key=lambda r: r.speedup.value if r.speedup else 0)
    assert best.speedup is not None
    gain = best.speedup
    assert f"{best.method} was fastest: {gain.value:.2f} times" in page
    assert f"95% interval {gain.low:.2f} to {gain.high:.2f}" in page
    assert "Every text was identical to plain decoding&#39;s, token for token: 216 of 216" in page


def test_other_texts_are_not_hidden(tmp_path: Path) -> None:
    made = report.make(write_run(tmp_path / "run", FEW, texts=2, repeats=1, wrong="salf"))
    assert "12 of 24 conversations were identical" in made.summary[-1] and "(salf)" in made.summary[-1]
    assert "In full precision that should not happen." in made.summary[-1]
    assert ("50%", "texts identical to plain decoding") in made.facts


def test_nothing_comes_from_outside(page: str) -> None:
    assert not re.search(r"https?:|@import|<link|<script|<img|\bsrc=|xmlns", page)
    references = re.findall(r'href="([^"]*)"', page)
    assert references and all(each.startswith(("#", "data:image/png;base64,")) for each in references)
    assert all(reference.startswith("#") for reference in re.findall(r"url\(([^)]*)\)", page))


def test_drawings_are_sound(page: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) == 2 * 8 + 1
    for each in drawings:
        ElementTree.fromstring(each)
    names = re.findall(r'\bid="([^"]*)"', page)
    assert len(names) == len(set(names))
    for reference in set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page)):
        assert reference in names
    assert "currentColor" in drawings[0] and "x &lt; y" in drawings[-1]


def test_csv_has_every_row(folder: Path, rows: list[results.Row]) -> None:
    lines = list(csv.DictReader(io.StringIO((folder / "report.csv").read_text("utf-8"))))
    assert [(line["method"], line["task"], float(line["temperature"])) for line in lines] == [
        (row.method, row.task, row.temperature) for row in rows
    ]
    for line, row in zip(lines, rows, strict=True):
        assert float(line["tau"]) == row.tau and row.speedup and row.split
        assert (float(line["speedup"]), float(line["speedup_low"])) == row.speedup[:2]
        assert float(line["split_verify"]) == row.split["verify"]


def test_markdown_shows_existing_figures(folder: Path, tmp_path: Path) -> None:
    text = (folder / "report.md").read_text("utf-8")
    figures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text)
    assert len(figures) == 16 and all((folder / figure).is_file() for figure in figures)
    assert "| salf | " in text and "made-up machine" in text
    target, shares = tmp_path / "docs" / "results.md", list[float]()
    small = write_run(tmp_path / "run", FEW, {"a": "b"}, (0.0,), texts=2, repeats=1)
    results_page.write([small], target, None, shares.append)
    assert shares[-1] == 1
    figures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", target.read_text("utf-8"))
    assert figures and all((target.parent / figure).is_file() for figure in figures)


def test_a_run_without_times(tmp_path: Path) -> None:
    place = write_run(tmp_path / "run", FEW, texts=2, repeats=1, temperatures=(0.0,))
    lines = [json.loads(line) for line in (place / "records.jsonl").read_text("utf-8").splitlines()]
    for line in lines:
        for turn in line["turns"]:
            turn.update(seconds=None, ttft=None, prefill=None, split=None)
    (place / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    made = report.make(place)
    assert "nothing was timed" in made.summary[1]
    assert not any(drawing.name.startswith(("speedup", "time", "predicted")) for drawing in made.sections[0].drawings)
    report.write(place)


def test_one_task_is_split_into_its_categories(tmp_path: Path) -> None:
    place = write_run(tmp_path / "run", FEW, texts=2, repeats=1, temperatures=(0.0,))
    lines = [json.loads(line) for line in (place / "records.jsonl").read_text("utf-8").splitlines()]
    text = "".join(json.dumps({**line, "task": "builtin"}) + "\n" for line in lines)
    (place / "records.jsonl").write_text(text, "utf-8")
    table = report.make(place).sections[0].tables[1]
    assert table.columns == ("method", *TASKS.values())


def test_example_trees(tmp_path: Path) -> None:
    methods = {"none": METHODS["none"], "chain:depth=2": ("self", "chain", 0.6, 2, 3)}
    place = write_run(tmp_path / "run", methods, {"a": "b"}, (0.0,), texts=1, repeats=1)
    engine = loading.load(tiny(), "self", "none")
    run = reading.load(place)
    for record in run.records:
        record.settings.pop("base_depth")
    how = (run, place, prompt(), {"max_new_tokens": 6}, lambda share: None)
    files = report.draw_trees(engine, "self", *how)
    assert [file.name for file in files] == ["chain_depth=2.svg"]
    ElementTree.fromstring(files[0].read_text("utf-8"))
    assert report.make(place).trees[0][0] == "chain_depth=2"
    with pytest.raises(InputError, match="drafted with ngram; give --drafter, one of self"):
        report.draw_trees(engine, "ngram", *how)
    run.provenance["target"] = {"name": "other", "weights": "0"}
    with pytest.raises(InputError, match="was run with other, not"):
        report.draw_trees(engine, "self", *how)


# ---- the command


def refusal(*words: object) -> str:
    result = CliRunner().invoke(app, ["report", *map(str, words)])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.output
    return result.stderr


def test_the_command_writes_and_names_its_files(tmp_path: Path) -> None:
    place = write_run(tmp_path / "run", FEW, texts=2, repeats=1, temperatures=(0.0,))
    result = CliRunner().invoke(app, ["report", str(place), "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    files = [Path(line) for line in result.output.split("\n") if line]
    assert files == [tmp_path / "page.html", place / "report.md", place / "report.csv"]
    assert all(file.stat().st_size for file in files)


def test_what_cannot_be_reported_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "not the folder of a benchmark" in refusal(tmp_path / "nowhere")
    place = write_run(tmp_path / "run", FEW, texts=1, repeats=1)
    (place / "records.jsonl").unlink()
    assert "no finished conversation" in refusal(place)
    (place / "records.jsonl").write_text('{"method": "none"}\n', "utf-8")
    assert "damaged" in refusal(place)
    (place / "run.json").write_text("{", "utf-8")
    assert "damaged" in refusal(place)
    assert ".html or a .md" in refusal(place, "--out", "page.pdf")
    assert "several folders" in refusal(place, place)


def test_an_unfinished_run_says_what_was_not_compared(tmp_path: Path) -> None:
    place = write_run(tmp_path / "run", FEW, texts=2, repeats=1, temperatures=(0.0,))
    lines = (place / "records.jsonl").read_text("utf-8").splitlines(keepends=True)
    (place / "records.jsonl").write_text("".join(lines[3:]) + '{"method": "be', "utf-8")
    assert report.make(place).summary[-1].endswith("10 of 10 conversations.")
    (place / "records.jsonl").write_text("".join(lines[1:]), "utf-8")
    made = report.make(place)
    assert "10 of 10 conversations." in made.summary[-1] and "2 more have no plain counterpart" in made.summary[-1]
    overall = {line[0]: line[-1] for line in made.sections[0].tables[0].rows}
    assert overall == {"none": "–", "beam": "5/5", "salf": "5/5"}
    (place / "records.jsonl").write_text("".join(line for line in lines if '"method": "none"' not in line), "utf-8")
    assert "No text was compared" in report.make(place).summary[-1]
    report.write(place)


def test_a_slowdown_is_not_called_a_gain(tmp_path: Path) -> None:
    slow = {"none": METHODS["none"], "beam": ("ngram", "beam", 0.01, 6, 60)}
    summary = report.make(write_run(tmp_path / "slow", slow, texts=4, repeats=1, temperatures=(0.0,))).summary
    assert "no method was faster than plain decoding; beam came closest: 0." in summary[1]
    plain = {"none": METHODS["none"], "auto": ("ngram", "auto", 0.0, 0, 1)}
    summary = report.make(write_run(tmp_path / "plain", plain, texts=1, repeats=1, temperatures=(0.0,))).summary
    assert "hardly drafted" in summary[1] or "no method was faster" in summary[1]
    assert "Only 3 prompts" in summary[2]


# ---- the papers' figures


def test_published_ranges_are_shown(page: str) -> None:
    lines = Cells(page).tables["Ours and theirs"]
    found = [line for line in lines if line[4] == "TALON (TALON, Table 1)"]
    assert found[0][0] == "talon" and found[0][5:] == ["5 models", "6 tasks", "1.72–5.16", "2.54–9.48"]
    assert "one H200, drafted by the published EAGLE-3 heads" in page


def test_a_missing_folder_is_an_input_error() -> None:
    with pytest.raises(InputError):
        report.make(Path("nowhere"))
