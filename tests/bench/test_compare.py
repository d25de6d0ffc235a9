"""The papers' tables with our rows among theirs: made-up runs, whose figures and order are known."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.bench_records import METHODS, write_run
from windfall import registry
from windfall.bench import reading, results
from windfall.bench.methods import parse_methods
from windfall.bench.package_data import read_toml
from windfall.bench.papers import tables
from windfall.bench.papers.tables import PaperTable, paper_tables
from windfall.bench.report import compare, results_page
from windfall.bench.report import page as report
from windfall.bench.store import Store
from windfall.bench.suites import SUITES
from windfall.cli import app
from windfall.core.types import InputError

NONE = METHODS["none"]
TASKS = {"mt_bench": "chat", "qa": "qa"}
EAGER = {  # label: drafter, policy, chance that a level is accepted, depth, rows
    "none": NONE,
    "chain": ("head", "chain", 0.3, 4, 5),
    "eagle-3": ("head", "beam", 0.55, 8, 60),
    "opt-tree": ("head", "opt-tree", 0.8, 6, 60),
    "talon": ("head", "talon", 0.7, 6, 60),
    "auto": ("head", "auto", 0.85, 6, 40),
}


def made_up(folder: Path, methods: dict[str, tuple[str, str, float, int, int]], suite: str, heat: float = 0.0) -> Path:
    """A run of a suite."""
    write_run(folder, methods, TASKS, (heat,), texts=3, repeats=1)
    about = json.loads((folder / "run.json").read_text("utf-8"))
    about["settings"]["suite"] = suite
    (folder / "run.json").write_text(json.dumps(about), "utf-8")
    return folder


TABLES = list(paper_tables().values())


# ---- the data


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.key)
def test_published_rows_fit_their_table(table: PaperTable) -> None:
    assert table.paper in read_toml(tables.FILE)["papers"] and table.suite in SUITES
    assert all(place < len(table.figures) for place in table.ranked_by)
    for found in table.published.values():
        assert found and set(found) <= {line.name for line in table.lines}
        for models in found.values():
            for cells in models.values():
                assert set(table.tasks) <= set(cells) <= {*table.tasks, tables.MEAN}
                assert {len(values) for values in cells.values()} == {len(table.figures)}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.key)
def test_rows_agree_with_their_own_means(table: PaperTable) -> None:
    """A mistyped number would move the mean of its row away from the published one."""
    rows = [own for found in table.published.values() for models in found.values() for own in models.items()]
    for model, cells in (row for row in rows if tables.MEAN in row[1]):
        pooled = table.paper == "GT" or (table.paper == "LTD" and model.startswith("DeepSeek"))
        for place, figure in enumerate(table.figures):
            values, wanted = [cells[task][place] for task in table.tasks], cells[tables.MEAN][place]
            if None in values or (figure.name == "tau" and pooled):  # a mean over all cycles, not over the row
                continue
            assert sum(v for v in values if v) / len(values) == pytest.approx(wanted, abs=0.025), model


def test_dynatrees_acceptance_agrees_with_its_lengths() -> None:
    """DynaTree's acceptance and what it is made of."""
    passes = paper_tables()["dynatree-t3"].published[0.0]
    for line, task, most in (("linear", "WikiText-2", 8), ("fixed tree", "PG-19", 8 + 2), ("DynaTree", "PG-19", 5 + 2)):
        accepted, _, path, _ = passes[line]["Pythia 2.8B"][task]
        assert accepted is not None and path is not None and accepted == pytest.approx(100 * path / most, abs=0.1)


def test_published_figures_are_found_by_policy() -> None:
    policies = read_toml(tables.FILE)["policies"]
    assert set(policies.values()) <= set(registry.policies())
    assert sum(len(tables.published_for(policy)) for policy in set(policies.values())) == 569
    talon = {(c.model, c.task, c.temperature): (c.tau, c.speedup) for c in tables.published_for("talon")}
    assert talon["Vicuna 13B", "HumanEval", 0.0] == (9.48, 5.16)
    assert talon["Qwen3 8B", "HumanEval", 1.0] == (3.70, 2.51)
    dynatree = {(c.table, c.task): (c.tau, c.speedup) for c in tables.published_for("dynatree")}
    assert dynatree == {
        ("Table 1 and Table 3", task): own for task, own in (("WikiText-2", (7.08, 1.64)), ("PG-19", (6.17, 1.70)))
    }
    assert not tables.published_for("auto") and tables.task_name("spec-bench-math") == "GSM8K"
    assert tables.task_name("something else") is None


def test_every_suite_measures_the_lines_of_its_tables() -> None:
    """What a suite runs by itself is found again; heads, grid search and trained policies are given beside it."""
    labels = {suite: [method.label for method in parse_methods(SUITES[suite].methods)] for suite in SUITES}
    for table in TABLES:
        if table.suite in ("salf-t2", "salf-t3", "ltd-t2"):
            continue
        for line in table.lines:
            for pattern in {line.ours, *line.at.values()} - {"", "*.json"}:
                given = pattern.startswith("ltd:path=") or table.key == "ltd-t9"
                known = any(compare.fnmatchcase(label, pattern) for label in labels[table.suite])
                assert given or known, (table.key, pattern)


# ---- rows and order


def test_our_rows_are_among_the_published_ones(tmp_path: Path) -> None:
    run = reading.load(made_up(tmp_path / "run", EAGER, "talon-t1,salf-t4"))
    (section,) = compare.sections([run], {"talon-t1": "Because of this."})
    assert section.title.startswith("TALON, Table 1") and "Because of this." in section.text
    assert "one H200" in section.text and "no Medusa and Hydra heads" in section.text
    (table,) = section.tables
    assert table.columns == ("method", "where", *paper_tables()["talon-t1"].tasks, "mean of 2")
    rows = {(row[1]): row for row in table.rows if row[1].startswith("here")}
    summary = {(row.method, row.task): row for row in results.summary(run)}
    for label in ("chain", "eagle-3", "opt-tree", "talon", "auto"):
        told = rows[f"here: {label}"][2:]
        for task, name in (("mt_bench", "MT-bench"), ("qa", "QA")):
            own = summary[label, task]
            assert own.speedup is not None
            assert told[paper_tables()["talon-t1"].tasks.index(name)] == compare.SLASH.join(
                [f"{own.speedup.value:.2f}", f"{own.tau:.2f}"]
            )
        assert told[0] == "–"
    theirs = next(row for row in table.rows if row[:2] == ["Medusa", "Vicuna 13B"])
    assert theirs[5].split(compare.SLASH) == ["2.01", "2.58"]
    assert theirs[-1].split(compare.SLASH) == ["1.81", "2.34"]  # over the two tasks that are here, too
    assert "noise" not in table.note and "qa stands" not in table.note and "mt_bench stands" not in table.note


def test_pairs_in_another_order_are_named(tmp_path: Path) -> None:
    run = reading.load(made_up(tmp_path / "run", EAGER, "talon-t1"))
    held = compare.compare(paper_tables()["talon-t1"], [run], 0.0)
    told = compare.order(held, 0)
    ours = {name: compare.mean_of(held.cells(name), held.tasks, 0) for name in held.own}
    assert max(ours, key=lambda name: ours[name] or 0) == "auto"
    assert re.search(r"by speed-up \(mean of the tasks\): auto \d", told)
    assert "In the paper's order: " in told and "of 6 pairs" in told
    assert "OPT-Tree before TALON" in told and "before SD" not in told  # SD is the slowest there, too
    assert "TALON before OPT-Tree" not in told
    taus = compare.order(held, 1)
    assert "by tau" in taus and "OPT-Tree before TALON" in taus


def test_differences_within_the_error_are_marked(tmp_path: Path) -> None:
    alike = {**EAGER, "opt-tree": EAGER["talon"], "talon": ("head", "talon", 0.69, 6, 60)}
    held = compare.compare(
        paper_tables()["talon-t1"], [reading.load(made_up(tmp_path / "run", alike, "talon-t1"))], 0.0
    )
    ratio = compare.ratio(held, "OPT-Tree", "TALON", 0)
    assert ratio is not None and ratio.low < 1 < ratio.high
    assert compare._certainty(held, "OPT-Tree", "TALON", 0) == " (within the error)"
    assert compare._certainty(held, "auto", "SD", 0) == ""
    other = compare.ratio(held, "auto", "SD", 1)
    assert other is not None and other.low > 1
    one, two = (results.tau([r for own in held.own[n].values() for r in own.records]) for n in ("auto", "SD"))
    assert other.value == pytest.approx(one / two)


def test_sweeps_name_the_best_value(tmp_path: Path) -> None:
    chances = {0.01: 0.5, 0.1: 0.9, 0.11: 0.6}
    methods = {"none": NONE, **{f"gt:c={c}": ("head", "gt", chance, 6, 40) for c, chance in chances.items()}}
    run = reading.load(made_up(tmp_path / "run", methods, "gt-t4"))
    told = compare.order(compare.compare(paper_tables()["gt-t4"], [run], 0.0), 0)
    assert "c=0.1 " in told and "The paper's best is c=0.11, here c=0.1" in told


def test_runs_are_put_together_and_tasks_can_have_methods_of_their_own(tmp_path: Path) -> None:
    first = {"none": NONE, "chain:depth=8": EAGER["chain"], "chain:depth=5": EAGER["talon"]}
    second = {"none": NONE, "dynatree-wikitext2": EAGER["talon"], "dynatree-pg19": EAGER["auto"]}
    runs = []
    for name, methods in (("a", first), ("b", second)):
        run = reading.load(made_up(tmp_path / name, methods, "dynatree-t1"))
        named = {"mt_bench": "wikitext2", "qa": "books"}
        runs.append(replace(run, records=[replace(r, task=named[r.task]) for r in run.records]))
    held = compare.compare(paper_tables()["dynatree-t1"], runs, 0.0)
    assert {name: [own.label for own in tasks.values()] for name, tasks in held.own.items()} == {
        "autoregressive": ["none", "none"],
        "linear": ["chain:depth=8", "chain:depth=5"],
        "DynaTree": ["dynatree-wikitext2", "dynatree-pg19"],
    }
    assert "books stands for PG-19" in compare.as_table(held).note
    assert {section.title.partition(":")[0] for section in compare.sections(runs)} == {
        f"DynaTree, Table {number}" for number in (1, 2, 3)
    }
    left = compare.missing(runs)
    assert "DynaTree, Table 1" not in left and "DynaTree, Table 5" in left


def test_two_methods_in_another_order(tmp_path: Path) -> None:
    methods = {"none": NONE, "talon": EAGER["chain"], "eagle-3": EAGER["talon"]}
    run = reading.load(made_up(tmp_path / "run", methods, "talon-t3", 1.0))
    (section,) = compare.sections([run])
    assert "The paper has them the other way round." in section.text
    assert "The drafter sees the noise of the draws here." in section.tables[0].note


def test_plain_decoding_alone_is_no_table(tmp_path: Path) -> None:
    run = reading.load(made_up(tmp_path / "run", {"none": NONE, "beam": METHODS["beam"]}, "gt-t3"))
    assert not compare.sections([run])


def test_memory_is_that_of_each_method_apart(tmp_path: Path) -> None:
    methods = {"none": NONE, "eagle-2": EAGER["eagle-3"], "gt": EAGER["auto"]}
    folder = made_up(tmp_path / "run", methods, "gt-t3")
    peaks = {"none": 2**30, "eagle-2": 2 * 2**30, "gt": 5 * 2**29}
    (folder / "memory.json").write_text(json.dumps(peaks), "utf-8")
    held = compare.compare(paper_tables()["gt-t3"], [reading.load(folder)], 0.0)
    gain, peak, ratio = held.cells("GT, dynamic")["all tasks"]
    assert peak == 2.5 and gain is not None and ratio == pytest.approx(gain / 2.5)
    assert held.cells("vanilla")["all tasks"][1:] == (1.0, 1.0)


def test_packed_records_are_read(tmp_path: Path) -> None:
    folder = made_up(tmp_path / "run", EAGER, "talon-t1")
    before, file = reading.load(folder), folder / "records.jsonl"
    packed = gzip.compress(file.read_bytes())
    file.unlink()
    (folder / "records.jsonl.gz").write_bytes(packed)
    assert reading.load(folder) == before
    with pytest.raises(InputError, match="are packed"):
        Store(folder, resume=True)
    (folder / "records.jsonl.gz").write_bytes(packed[:-20])
    with pytest.raises(InputError, match=r"damaged records\.jsonl\.gz"):
        reading.load(folder)


# ---- the page


def test_one_page_of_several_runs(tmp_path: Path) -> None:
    suite = made_up(tmp_path / "suites", EAGER, "talon-t1")
    other = write_run(tmp_path / "other", {"none": NONE, "beam": METHODS["beam"]}, {"a": "b"}, (0.0,), 2, 1)
    notes = tmp_path / "notes.md"
    notes.write_text("# Notes\n\n## summary\n\nIn short.\n\n## talon-t1\nThe head is small.\n", "utf-8")
    for kind in ("md", "html"):
        page = tmp_path / "docs" / f"results.{kind}"
        done = CliRunner().invoke(
            app, ["report", str(suite), str(other), "--notes", str(notes), "--out", str(page)], catch_exceptions=False
        )
        assert done.exit_code == 0 and done.output.strip() == str(page)
        text = page.read_text("utf-8")
        assert "In short." in text and "The head is small." in text and "TALON, Table 1" in text
        assert "Tables that were not measured" in text and "Run suites" in text and "Ours and theirs" in text
        assert text.index("TALON, Table 1") < text.index("Run suites")
        assert f"windfall report suites other --notes notes.md --out results.{kind}" in text
    figures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", (tmp_path / "docs" / "results.md").read_text("utf-8"))
    assert figures and all((tmp_path / "docs" / figure).is_file() for figure in figures)
    ids = re.findall(r'\bid="([^"]*)"', (tmp_path / "docs" / "results.html").read_text("utf-8"))
    assert len(ids) == len(set(ids))


def test_unknown_notes_and_duplicate_names_are_refused(tmp_path: Path) -> None:
    run, page, notes = made_up(tmp_path / "run", EAGER, "talon-t1"), tmp_path / "docs" / "x.md", tmp_path / "notes.md"
    notes.write_text("## talon-t9\nNobody would read this.\n", "utf-8")
    with pytest.raises(InputError, match="under '## talon-t9', which is no table; choose from summary, salf-t1"):
        results_page.write([run], page, notes)
    with pytest.raises(InputError, match="two of these folders are called 'run'"):
        results_page.write([run, made_up(tmp_path / "other" / "run", EAGER, "talon-t3", 1.0)], page)
    assert not page.parent.exists()


def test_a_runs_own_page_has_the_tables_of_its_suites(tmp_path: Path) -> None:
    titles = [section.title for section in report.make(made_up(tmp_path / "run", EAGER, "talon-t1")).sections]
    assert titles[0] == "Temperature 0 (greedy)" and titles[1].startswith("TALON, Table 1")
    assert "Compared with the papers" not in titles


def test_a_single_task_of_several_categories_is_still_that_task_in_the_papers(tmp_path: Path) -> None:
    methods = {"none": NONE, **{f"gt:c={c}": ("head", "gt", 0.5, 6, 60) for c in (0.1, 0.2)}}
    folder = made_up(tmp_path / "run", methods, "gt-t4")
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text("utf-8").splitlines()]
    rows = [{**row, "category": row["id"]} for row in rows if row["task"] == "mt_bench"]
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    titles = [section.title for section in report.make(folder).sections]
    assert any(title.startswith("GT, Table 4") for title in titles)
