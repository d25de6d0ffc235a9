"""The tables of the documentation are those of the result files, and every kind of result becomes a table."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.cli import folder, windfall
from helpers.serving import new_engine, running
from windfall.bench.tasks import load_tasks
from windfall.bench.throughput.serve import engine_server

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import serve_overhead  # noqa: E402
import table_renderers as renderers  # noqa: E402
import tables  # noqa: E402

__all__ = ["folder"]  # the fixture
ABOUT = {
    "machine": {"cpu": "Some CPU", "cores": 16, "gpu": None},
    "gpu": "NVIDIA H200",
    "versions": {"torch": "2.11", "transformers": "5.17", "windfall": "0.2"},
    "date": "2026-11-17T10:00:00+00:00",
}
ORIGIN = "Measured on one NVIDIA H200 with torch 2.11, transformers 5.17 and windfall 0.2, 2026-11-17"
SETTINGS = {"tasks": ["a", "b"], "limit": 3, "max_new_tokens": 64, "ignore_eos": True, "rounds": 2}


def test_the_pages_have_the_tables_of_their_files() -> None:
    """Without installed packages: the check needs the standard library only."""
    command = [sys.executable, "-S", str(ROOT / "benchmarks" / "tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_stage_of_the_gpu_script_has_a_table() -> None:
    script = (ROOT / "benchmarks" / "gpu.sh").read_text("utf-8")
    stages = re.findall(r"^\t([\w-]+)\) ", script, re.MULTILINE)
    assert len(stages) > 10
    assert {tables.STAGES.get(stage, stage) for stage in stages} <= tables.RESULTS


# ---- pages


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with pages, and without results."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    for page in (tables.OVERVIEW, tables.DETAILS):
        own = [name for name, section in tables.SECTIONS.items() if section.page == page]
        text = "\n".join(f"before {name}\n\n<!-- table: {name} -->\nold\n<!-- end -->\n" for name in own)
        (tmp_path / page).write_text(f"# Page\n\n{text}\nafter\n")
    tables.write(tmp_path)
    return tmp_path


def put(root: Path, name: str, result: Any) -> None:
    (root / "benchmarks" / "results" / f"{name}.json").write_text(json.dumps(result))


def test_sections_without_files_are_empty(root: Path) -> None:
    for page in (tables.OVERVIEW, tables.DETAILS):
        text = (root / page).read_text()
        assert {inner for _, inner in tables.SECTION.findall(text)} == {""} and "|" not in text and "##" not in text
        assert text.startswith("# Page\n\nbefore ") and text.endswith("\nafter\n")
    assert tables.check(root) == []


def test_a_new_measurement_reaches_its_section_alone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (root / tables.DETAILS).read_text()
    put(root, "products-h200", PRODUCTS)
    assert tables.check(root) == ["docs/performance-gpu.md: section 'products'"]
    capsys.readouterr()
    tables.write(root)
    assert capsys.readouterr().out == "docs/performance-gpu.md\n" and tables.check(root) == []
    after = (root / tables.DETAILS).read_text()
    assert "| some model | o | 1,024 x 2 | 0.92 | 1.38 |" in after
    assert f"{ORIGIN}\n([products-h200.json](../benchmarks/results/products-h200.json))." in after
    assert after.partition("<!-- table: products -->")[0] == before.partition("<!-- table: products -->")[0]
    (root / tables.DETAILS).write_text(after.replace("1.38", "1.37"))
    assert tables.check(root) == ["docs/performance-gpu.md: section 'products'"]
    tables.write(root)
    assert (root / tables.DETAILS).read_text() == after


@pytest.mark.parametrize(
    "damage", [("<!-- end -->", ""), ("<!-- table: shapes -->", ""), ("shapes -->", "unknown -->")]
)
def test_a_page_must_have_all_sections(root: Path, damage: tuple[str, str]) -> None:
    page = root / tables.DETAILS
    page.write_text(page.read_text().replace(*damage))
    with pytest.raises(ValueError, match="must have these sections, each once and with an end: draft-phase, products"):
        tables.check(root)


def test_results_of_the_gpu_script_are_taken_over(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "price.json").write_text(json.dumps(PRICE))
    (out / "products.json").write_text(json.dumps(PRODUCTS))
    (out / "unknown.json").write_text("{}")
    assert tables.take(out, "h200", root) == ["exact-price-h200.json", "products-h200.json"]
    tables.write(root)
    assert "0.92" in (root / tables.DETAILS).read_text() and "1,634" in (root / tables.OVERVIEW).read_text()
    with pytest.raises(ValueError, match=r"price\.json was not measured on a GPU whose name has 'a100' in it"):
        tables.take(out, "a100", root)
    assert tables.measured_on("rtx4090", {"provenance": {"machine": {"gpu": "NVIDIA GeForce RTX 4090"}}})
    (out / "products.json").write_text("{")
    with pytest.raises(ValueError, match=r"products\.json is not JSON"):
        tables.take(out, "h200", root)
    with pytest.raises(ValueError, match="has no results"):
        tables.take(root, "h200", root)


def run_main(monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["tables.py", *options])
    with pytest.raises(SystemExit) as end:
        tables.main()
    return end.value.code


def test_the_command(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tables, "ROOT", root)
    out = root / "out"
    out.mkdir()
    (out / "products.json").write_text(json.dumps({**PRODUCTS, "gpu": "NVIDIA A100"}))
    assert run_main(monkeypatch, "--take", str(out)) == (
        "tables.py: products.json was not measured on a GPU whose name has 'h200' in it"
    )
    capsys.readouterr()
    assert not run_main(monkeypatch, "--take", str(out), "--gpu", "a100")
    taken, _, table = capsys.readouterr().out.partition("\n")
    assert taken == "benchmarks/results/products-a100.json" and table.startswith("| model | product |")
    assert not run_main(monkeypatch, "--check") and capsys.readouterr().out == ""
    put(root, "products-h200", PRODUCTS)
    assert run_main(monkeypatch, "--check") == 1
    assert capsys.readouterr().out.startswith("docs/performance-gpu.md: section 'products' differs from benchmarks/")
    assert not run_main(monkeypatch) and capsys.readouterr().out == "docs/performance-gpu.md\n"


def test_notes_and_stopped_runs_are_named_after_the_table() -> None:
    found = renderers.sources(
        {"a.json": {**ABOUT, "note": "Old kernels."}, "b.json": ABOUT, "c.json": {"finished": False}}
    )
    a, b, c = (f"[{name}.json](../benchmarks/results/{name}.json)" for name in "abc")
    assert found.startswith(
        f"{ORIGIN} ({a}, {b}). Measured on an unknown machine ({c}). Old kernels. The run of `c.json`"
    )


def test_another_format_is_named(root: Path) -> None:
    put(root, "shapes-h200", {"shapes": [], **ABOUT})
    with pytest.raises(ValueError, match=r"shapes-h200\.json: not in the format of its tool"):
        tables.check(root)


# ---- results of scripts that need a GPU, and of other engines


def priced(policy: str, temperature: float, exact: float, fast: float, different: int = 0) -> list[dict[str, Any]]:
    about = {"policy": policy, "temperature": temperature, "texts": 6}
    return [
        {**about, "mode": "exact", "tokens_per_second": exact, "of_fast": exact / fast, "different": 0},
        {**about, "mode": "fast", "tokens_per_second": fast, "of_fast": 1.0, "different": different},
    ]


PRICE = {
    "rows": [
        *(priced("none", 0.0, 1634.2, 1652) + priced("auto", 0.0, 3476, 3726, 2) + priced("beam", 0.0, 90.04, 89.0, 1)),
        *(
            priced("none", 1.0, 1619.6, 1633.4)
            + priced("auto", 1.0, 2436, 2646, 4)
            + priced("beam", 1.0, 88.0, 89.0, 3)
        ),
    ],
    **{"dtype": "bfloat16", "tokens": 128, "widened_to": None, **ABOUT},
}
PRODUCTS = {
    "products": [
        {"model": "some model", "product": "o", "outputs": 1024, "inputs": 2, "ratio": {"1": 0.915, "8": 1.381}}
    ],
    **ABOUT,
}


def test_the_price_of_exactness() -> None:
    wide = {**PRICE, "rows": priced("none", 0.0, 230, 232), "widened_to": "llama-3.1-8b"}
    lines, about = renderers.exact_price({"exact-price": PRICE, "exact-price-8b": wide})
    assert lines == [
        "| | greedy: exact | `--fast` | ratio | temperature 1: exact | `--fast` | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| `none` | 1,634 | 1,652 | 0.99 | 1,620 | 1,633 | 0.99 |",
        "| `beam` | 90.0 | 89.0 | 1.01 | 88.0 | 89.0 | 0.99 |",
        "| `auto` | 3,476 | 3,726 | 0.93 | 2,436 | 2,646 | 0.92 |",
        "| 8B cost: `none` | 230 | 232 | 0.99 | | | |",
    ]
    assert about == (
        "Compared with `--fast`, plain decoding loses 1%, `beam` 0 to 1% and `auto` 7 to 8%. "
        "At 8B cost, plain decoding loses 1%. Texts have up to 128 new tokens."
    )


def test_compared_texts() -> None:
    texts = {**PRICE, "rows": [row for row in PRICE["rows"] if row["mode"] == "exact"]}
    batch = {"policy": "auto", "way": "batches of 8", "texts": 12, "different": 0}
    batches = {"rows": [batch, {**batch, "policy": "beam"}], "dtype": "torch.float32"}
    lines, about = renderers.exact_texts({"exact-texts": texts, "batch-texts": batches, "exact-price": PRICE})
    assert lines[2:] == [
        "| exact passes | bfloat16 | `auto`, `beam` | 6 | 24 | 0 |",
        "| `--fast` | bfloat16 | `auto`, `beam` | 6 | 24 | 10 |",
        "| batches of 8 | float32 | `auto`, `beam` | 6 | 24 | 0 |",
    ]
    assert "generated alone" in about
    wrong = {**PRICE, "rows": [{**row, "different": 1} for row in PRICE["rows"]]}
    lines, about = renderers.exact_texts({"exact-texts": texts, "exact-price": wrong})
    assert lines[3] == "| exact passes | bfloat16 | `auto`, `beam` | 6 | 24 | 4 |" and about == ""


def test_many_sizes_of_products_are_thinned_out() -> None:
    sizes = [str(size) for size in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320)]
    row = {**PRODUCTS["products"][0], "ratio": dict.fromkeys(sizes, 1.0)}
    lines, _ = renderers.products({"products": {"products": [row]}})
    assert lines[0] == "| model | product | outputs x inputs | 1 | 4 | 16 | 32 | 64 | 128 | 320 |"


def test_shapes() -> None:
    exact = {"step_us": 4471.5, "of_floor": 1.268, "verify_us": {"1": 4414.8, "16": 4620.6, "32": 5195.9}}
    row = {"name": "llama-3.1-8b", "bytes": 15_009_849_344, "floor_us": 3526.96, "fast": exact, "exact": exact}
    lines, about = renderers.shapes({"shapes": {"shapes": [row], "length": 512, "bandwidth_tb_s": 4.2557}})
    assert lines[0].endswith("| over floor | pass over 16 rows, ms | 32 |")
    assert lines[2] == "| Llama-3.1-8B | 15.0 | 3.53 | 4.47 | 1.27 | 4.62 | 5.20 |"
    assert about == "Passes come after 512 tokens. A large copy reaches 4.26 TB/s."


def test_the_draft_phase() -> None:
    times = {"first_ms": 0.063, "draft_ms": 0.3451, "verify_ms": 0.79}
    rows = [{"drafter": "bundled head", "temperature": t, **times} for t in (0.0, 1.0)]
    result = {"rows": rows, "passes": 7, "length": 512, "block": 8, "widened_to": None, **ABOUT}
    lines, about = renderers.draft_phase({"draft-phase": result, "draft-phase-8b": {**result, "rows": rows[:1]}})
    assert lines[0].startswith("| drafter | greedy: first pass | all 7 | verify pass | temperature 1: first pass |")
    assert lines[2] == "| bundled head | 0.063 | 0.345 | 0.790 | 0.063 | 0.345 | 0.790 |"
    assert lines[3] == "| 8B cost: bundled head | 0.063 | 0.345 | 0.790 | | | |"
    assert about == "Passes come after 512 tokens. Blocks have 8 rows."


def throughput_row(method: str, requests: int, speed: float, **others: Any) -> dict[str, Any]:
    about = {"temperature": 0.0, "arrivals": "batch", "runner": "gpu", "fallback": None, "texts": 4, "same_texts": 4}
    known = {"method": method, "concurrency": requests, "tokens_per_second": speed, "seconds": 900 / speed, "rounds": 2}
    return {**known, **about, **others}


def test_throughput_with_transformers() -> None:
    theirs = {"runner": "transformers", "texts": None, "same_texts": None}
    rows = [
        *(throughput_row("none", 1, 1000.0), throughput_row("HF generate", 1, 20.5, **theirs)),
        *(throughput_row("auto", 1, 2500.0), throughput_row("none", 8, 4000.0), throughput_row("auto", 8, 6000.0)),
    ]
    skipped = [{"method": "HF continuous", "concurrency": n, "reason": "it needs an accelerator"} for n in (1, 8)]
    skipped.append({"method": "HF generate", "concurrency": 8, "reason": "out of memory."})
    result = {"rows": rows, "skipped": skipped, "settings": SETTINGS, "provenance": ABOUT, "finished": True}
    lines, about = renderers.throughput({"throughput": result})
    assert lines == [
        "| tokens/s by requests | 1 | 8 |",
        "|---|---:|---:|",
        "| `none` | 1,000 | 4,000 |",
        "| `auto` | 2,500 | 6,000 |",
        "| transformers `generate` | 20.5 | |",
        "",
        "| speed-up by requests | 1 | 8 |",
        "|---|---:|---:|",
        "| `auto` | 2.50 | 1.50 |",
        "| transformers `generate` | 0.02 | |",
    ]
    assert about == (
        "Setting: greedy, requests are submitted together, 3 prompts of each of 2 tasks, 64 new tokens, "
        "medians of 2 rounds. The shortest run took 0.07 s. 16 of 16 texts are those of plain decoding. "
        "transformers continuous batching was left out: it needs an accelerator. "
        "transformers `generate` was left out with 8 requests: out of memory."
    )


def test_one_request_before_and_now() -> None:
    rows = [{"method": "auto", "temperature": 1.0, "before": 200.0, "after": 210.0}]
    settings = {"limit": 3, "tasks": ["a.jsonl"], "tokens": 64, "rounds": 1}
    lines, about = renderers.one_request({"one-request": {"rows": rows, "settings": settings}})
    assert lines[2:] == ["| `auto` | 1 | 200 | 210 | 1.05 |"]
    assert about == "3 prompts of each of 1 task, up to 64 new tokens, medians of 1 round."


# ---- results as the tools write them


def run_script(command: str, folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a script of benchmarks/ writes for a tiny model."""
    script, *options = command.split()
    models = ("--target", str(folder), "--drafter", "ngram", "--device", "cpu")
    monkeypatch.setattr(sys, "argv", [script, *options, *models, "--json", str(out)])
    codes: list[Any] = []
    monkeypatch.setattr(sys, "exit", codes.append)
    runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
    assert not any(codes)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("name", "command", "first", "cells"),
    [
        ("exact-price", "exact.py builtin --limit 1 --tokens 4 --policies chain --dtype float32", "`none`", 7),
        (
            "exact-texts",
            "exact.py builtin --limit 1 --tokens 4 --policies chain --dtype float32 --texts --modes exact",
            "exact passes | float32 | `chain`",
            6,
        ),
        (
            "batch-texts",
            "batch_texts.py builtin --limit 1 --tokens 4 --policies chain --sizes 2",
            "batches of 2 | float32 | `chain`",
            6,
        ),
        ("first-token", "first_token.py --lengths 8,200 --policies none,chain --rounds 1", "`none`", 3),
        (
            "soak",
            "soak.py --requests 12 --cases 4 --policy chain --longest 20 --tokens 6 --max-requests 3",
            "CPU | no | `chain` | 12 | 3",
            11,
        ),
    ],
)
def test_what_a_script_writes_becomes_a_table(
    name: str, command: str, first: str, cells: int, folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(root, f"{name}-h200", run_script(command, folder, root / "out.json", monkeypatch))
    section = next(each for each in tables.SECTIONS.values() if name in each.files)
    text = tables.body(section, "h200", root)
    head, _, row = text.splitlines()[:3]
    assert row.startswith(f"| {first} |") and row.count("|") == head.count("|") == cells + 1
    assert re.search(rf"Measured on .* \(\[{name}-h200\.json\]", text.replace("\n", " "))


def test_what_requests_for_the_host_gain_becomes_a_table(
    folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--limit 2 --concurrency 2 --kinds logprobs,policy --tokens 4 --rounds 1 --dtype float32"
    put(root, "host-requests-h200", run_script(f"host_requests.py builtin {options}", folder, root / "x", monkeypatch))
    lines = tables.body(tables.SECTIONS["host-requests"], "h200", root).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert [row.count("|") for row in rows] == [6] * 4 and rows[2].startswith("| logprobs | 2 |")
    assert any("medians of 1 round; 0 texts differed." in line for line in lines)


def test_what_bench_throughput_writes_becomes_a_table_and_a_plot(
    folder: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = root / "benchmarks" / "results" / "throughput-h200.json"
    options = "--methods chain:depth=2 --limit 1 --max-new-tokens 4 --rounds 1 --concurrency 1,2 --ignore-eos"
    windfall("bench", "throughput", "--target", folder, *options.split(), "--out", out)
    assert tables.check(root) == ["docs/performance.md: section 'throughput'", "docs/throughput-h200.png"]
    tables.write(root)
    assert tables.check(root) == []
    text = re.sub(r"(?<=\w)\n(?=\w)", " ", (root / tables.OVERVIEW).read_text())
    assert text.count("| speed-up by requests | 1 | 2 |") == 4  # two temperatures and two kinds of arrivals
    assert text.count("| transformers `generate` |") == 4 and text.count("| `chain:depth=2` |") == 8
    assert "### Many requests at once\n\n" in text and "](throughput-h200.png)" in text
    assert "*Temperature 1; a request is submitted whenever one ends:*" in text
    assert "`none` ran on the host loop: graphs are off." in text
    assert "transformers continuous batching was left out: continuous batching needs an accelerator." in text
    out.write_text(re.sub('"date": "[^"]+"', '"date": "2030-01-01T00:00:00+00:00"', out.read_text()))
    assert "docs/throughput-h200.png" in tables.check(root)


def test_what_the_overhead_of_the_server_is_becomes_a_table(root: Path) -> None:
    out, file = root / "load.json", root / "prompts.jsonl"
    file.write_text('{"prompt": "Hi"}\n')
    made = new_engine()
    bare = serve_overhead.run(made, engine_server(made, 0.0), load_tasks([str(file)], 1), 2, 4, 5)
    with running(made) as url:
        options = "--requests 4 --max-new-tokens 5 --concurrency 2 --ignore-eos"
        done = windfall("bench", "serve", f"{url}/v1", "--tasks", file, *options.split(), "--out", out)
    made.close()
    assert done.exit_code == 0, done.stderr
    (served,) = json.loads(out.read_text())["rows"]
    assert served["tokens"] == 20
    same, halved = ({**served, "tokens_per_second": bare["tokens_per_second"] / part} for part in (1, 2))
    rows = [serve_overhead.row("auto", 2, 0, [{"engine": bare, "server": served}])]
    rows.append(serve_overhead.row("none", 2, 4, [{"engine": bare, "server": each} for each in (same, halved, halved)]))
    assert rows[0]["overhead"] == 1 - served["tokens_per_second"] / bare["tokens_per_second"]
    about = {"target": "tiny", "device": "cuda", "dtype": "bfloat16", "settings": {"tokens": 5, "rounds": 3}}
    put(root, "serve-h200", {**ABOUT, **about, "rows": rows})
    text = tables.body(tables.SECTIONS["serve"], "h200", root)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert [line.count(" | ") for line in lines if "---" not in line] == [12] * 3
    assert lines[2].startswith("| NVIDIA H200 | `auto` | 2 |") and " | 50.0% | " in lines[3]
    assert "tiny in bfloat16, greedy, 5 new tokens, medians of 3 rounds." in text.replace("\n", " ")
