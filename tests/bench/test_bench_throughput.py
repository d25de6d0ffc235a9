"""`windfall bench throughput`, on tiny random models: figures fit together, and texts are compared."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.cli import character_tokenizer, folder, refused, windfall
from helpers.random_heads import random_head
from helpers.tiny import tiny
from windfall.bench.methods import parse_methods
from windfall.bench.speed.speed import Ready
from windfall.bench.tasks import Prompt
from windfall.bench.throughput import contest, throughput
from windfall.bench.throughput.answers import Answer, Part, Run, figures, rounds_of, spread
from windfall.bench.throughput.engines import Engines
from windfall.bench.throughput.serve import run_cell
from windfall.bench.throughput.throughput import Result
from windfall.bench.throughput.workload import BATCH, STREAM, Cell, Settings, repeated
from windfall.core.types import GpuOptions, Split
from windfall.model.target import Target

__all__ = ["folder"]  # the fixture
PROMPTS = [Prompt("talk", "", name, (f"tell me {name}",)) for name in ("a story", "more")]
TOKENS = 4
BEAM, SVIP = "beam:depth=2:k=2:nodes=6", "svip:depth=2:k=2:nodes=6"
SHORT = "--methods chain:depth=2 --limit 1 --max-new-tokens 4 --rounds 1 --temperature 0 --ignore-eos"


@pytest.fixture(scope="module")
def measured() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A whole measurement with a head on fixed buffers, and what was kept on the way."""
    target, kept = Target(tiny(num_hidden_layers=2), character_tokenizer(), "tiny"), list[dict[str, Any]]()
    settings = Settings(
        concurrency=(1, 3),
        rounds=2,
        max_new_tokens=TOKENS,
        ignore_eos=True,
        gpu_options=GpuOptions(graphs=True, pages=True),
    )
    throughput.measure(
        Result(target.name, {}, {}),
        target,
        parse_methods([f"{BEAM},{SVIP}"]),
        Ready("head", {}, random_head(taps=(0, 1, 2))),
        PROMPTS,
        settings,
        lambda found: kept.append(json.loads(json.dumps(found.as_dict()))),
    )
    return kept[-1], kept


def test_every_method_is_measured_in_every_cell(measured: Any) -> None:
    told, kept = measured
    ours = ["none", BEAM, SVIP]
    wanted = [
        (method, temperature, arrivals, concurrency)
        for temperature in (0, 1)
        for arrivals in (BATCH, STREAM)
        for concurrency in (1, 3)
        for method in (*ours, *(["HF generate"] if arrivals == BATCH else []))
    ]
    found = [tuple(row[name] for name in ("method", "temperature", "arrivals", "concurrency")) for row in told["rows"]]
    assert found == wanted
    assert told["finished"] and not kept[0]["finished"] and len(kept[0]["rows"]) == 1
    assert {each["reason"] for each in told["skipped"]} == {"continuous batching needs an accelerator"}


def test_the_figures_of_a_row_fit_together(measured: Any) -> None:
    for row in measured[0]["rows"]:
        requests = {(BATCH, 1): 2, (BATCH, 3): 3, (STREAM, 1): 3, (STREAM, 3): 9}[row["arrivals"], row["concurrency"]]
        assert row["rounds"] == 2 and row["requests"] == 2 * requests
        assert row["tokens_per_second"] > 0 and row["over_none"] > 0
        if row["arrivals"] == BATCH:
            assert row["tokens"] == 2 * requests * TOKENS
        if row["method"] == "HF generate":
            assert row["runner"] == "transformers" and row["ttft"] is row["tau"] is None
            continue
        assert 0 < row["ttft"]["median"] <= row["ttft"]["p95"] and 0 < row["tpot"]["median"] <= row["tpot"]["p95"]
        assert 1 <= row["requests_per_pass"] <= row["concurrency"] and row["rows_per_pass"] >= row["requests_per_pass"]
        assert 0 <= row["rest_share"] <= 1
        if row["method"] == "none":
            assert row["over_none"] == row["tau"] == 1 and row["draft_passes"] == 0
            assert row["rows_per_pass"] == row["requests_per_pass"]
        else:
            assert row["draft_passes"] > 0


def test_a_row_says_where_its_requests_ran(measured: Any) -> None:
    on = {row["method"]: (row["runner"], row["fallback"]) for row in measured[0]["rows"]}
    assert on["none"] == on[BEAM] == ("gpu", None)
    assert on[SVIP] == ("host", "its policy decides during a cycle, on the host")


def test_texts_are_those_of_plain_decoding(measured: Any) -> None:
    for row in measured[0]["rows"]:
        if row["method"] == "HF generate":
            assert not row["exact"] and (row["texts"] is None) == bool(row["temperature"])
        else:
            assert row["exact"] and row["same_texts"] == row["texts"] == row["requests"]


def part(time: float, tokens: int, rows: int = 1, passes: int = 0, seconds: float = 0.1) -> Part:
    return Part(time, tokens, rows, passes, Split(seconds, seconds))


def test_passes_over_prompts_are_no_rest() -> None:
    split = Split(draft=0.1, verify=0.2, policy=0.05, other=0.15, prompts=0.3)
    assert split.total == pytest.approx(0.5) and split.passes == pytest.approx(0.6)
    answer = Answer((1,), 0.0, 1.0, (Part(1.0, 1, 1, 1, split),))
    assert figures([Run([answer], [(0.0, 1.0)])])["rest_share"] == pytest.approx(0.4)


def test_rounds_that_capture_graphs_are_counted() -> None:
    parts = [part(1.0, 1), part(2.0, 1)._replace(recorded=True)]
    assert figures([Run([Answer((1, 2), 0.0, 2.0, tuple(parts))], [(0.0, 2.0)])])["captures"] == 1
    assert figures([Run([Answer((1,), 0.0, 1.0, tuple(parts[:1]))], [(0.0, 2.0)])])["captures"] == 0


def test_no_garbage_is_collected_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    monkeypatch.setattr(contest, "run_cell", lambda *_: found.append(gc.isenabled()) or Run([], []))
    made = contest.Contest(SimpleNamespace(settings=Settings()), [], [], 0)  # type: ignore[arg-type]
    monkeypatch.setattr(made, "_server", lambda entry: None)
    made._measure(contest.Entry("none", Cell(0.0, STREAM, 1), *parse_methods(["none"])))
    assert found == [False] and gc.isenabled()


def test_steps_with_the_same_times_are_one_round() -> None:
    one = Answer((1, 2, 3), 0.0, 2.0, (part(1.0, 1, 4, 2, 0.2), part(2.0, 2, 3, 1)))
    other = Answer((4, 5), 0.5, 2.01, (part(1.01, 1, 2, 1, 0.2), part(2.01, 1, 5, 0)))
    run = Run([one, other], [(0.0, 2.01)])
    assert [len(each) for each in rounds_of(run.counted)] == [2, 2]
    told = figures([run])
    assert told["tokens"] == 5 and told["tau"] == 5 / 4 and told["rows_per_pass"] == 7
    assert told["draft_passes"] == 1.5 and told["rest_share"] == pytest.approx(1 - 0.6 / 2.01)
    assert told["ttft"]["median"] == pytest.approx(0.755) and told["tpot"]["median"] == pytest.approx(0.75)
    again = Answer((1, 2), 0.0, 2.0, (part(1.0, 1), part(2.0, 1)))  # two rounds that took equally long
    assert [len(each) for each in rounds_of([again.parts])] == [1, 1]
    assert spread([None]) is None


def answer(submitted: float, ended: float) -> Answer:
    parts = tuple(part(at, 1, seconds=at) for at in (ended - 0.5, ended))  # each in a round of its own
    return Answer((1, 2), submitted, ended, parts)


def test_batches_count_as_a_whole() -> None:
    answers = iter([[answer(0, 1), answer(0, 3)], [answer(10, 14), answer(10, 11)]])
    run = run_cell(lambda cases, size: next(answers), [None] * 4, Cell(0, BATCH, 2))  # type: ignore[list-item]
    assert run.windows == [(0, 3), (10, 14)] and run.tokens == 8 and run.seconds == 7


def test_the_ramps_of_a_stream_do_not_count() -> None:
    answers = [answer(0, 2), answer(0, 3), answer(2, 5), answer(3, 6), answer(5, 9), answer(6, 10)]
    run = run_cell(lambda cases, size: answers, [None] * 6, Cell(0, STREAM, 2))  # type: ignore[list-item]
    assert run.windows == [(3, 6)]  # after the second of six texts, up to the fourth
    assert run.tokens == 4 and run.tokens_per_second == pytest.approx(4 / 3)


def test_a_stream_counts_whole_rounds() -> None:
    """The Steps of a round come one after another."""

    def steps(start: int, late: float) -> Answer:
        parts = tuple(part(start + at + late, 1, seconds=start + at) for at in (1, 2))
        return Answer((1, 2), start, parts[-1].time, parts)

    answers = [steps(start, late) for start in (0, 2, 4) for late in (0.0, 0.25)]
    run = run_cell(lambda cases, size: answers, [None] * 6, Cell(0, STREAM, 2))  # type: ignore[list-item]
    assert run.windows == [(2.25, 4.25)] and [len(each) for each in rounds_of(run.counted)] == [2, 2]
    answers[0], answers[1] = steps(0, 0.25), steps(0, 0.5)  # the second text ends before the round does
    answers.append(Answer((1,) * 9, 0, 9.0, tuple(part(at + 0.75, 1, seconds=at) for at in range(1, 9))))
    run = run_cell(lambda cases, size: answers, [None] * 7, Cell(0, STREAM, 2))  # type: ignore[list-item]
    assert run.windows[0][0] == 2.75


def test_repeated_prompts_begin_differently() -> None:
    found = repeated(PROMPTS, 5)
    assert len({each.id for each in found}) == len({each.turns[0][:6] for each in found[::2]}) + 2 == 5
    assert found[:2] == PROMPTS and found[4].turns == ("(3) tell me a story",) and repeated(PROMPTS, 1) == PROMPTS[:1]


def test_engines_share_weights_and_make_room_for_each_other() -> None:
    target = Target(tiny(), character_tokenizer(), "tiny")
    engines = Engines(target, Ready("head", {}, random_head()), Settings(concurrency=(2, 40)))
    plain, beam, chain = parse_methods(["beam,chain:depth=2"])
    number, first = engines.get(beam)
    other = engines.get(chain)[1]
    assert first.drafter is not other.drafter and first.drafter.head is other.drafter.head  # type: ignore[attr-defined]
    assert first.max_requests == 40 and engines.get(beam) == (number, first)
    engines._drop_oldest()
    assert engines.get(chain)[0] not in (1, 2) and engines.get(plain)[1].target.model is target.model
    engines.close()
    with pytest.raises(RuntimeError, match="closed"):
        first.submit([1, 2])


def test_the_command_fills_table_file_and_plot(folder: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "new" / "throughput.json", tmp_path / "throughput.png"
    at = ("bench", "throughput", "--target", folder, *SHORT.split(), "--concurrency", "2,1")
    result = windfall(*at, "--out", out, "--plot", plot)
    assert result.exit_code == 0
    told = json.loads(out.read_text())
    assert told["finished"] and told["target"] == "tiny" and told["settings"]["methods"] == ["none", "chain:depth=2"]
    assert told["provenance"]["drafters"]["ngram"]["class"].endswith("NGramDrafter")
    assert told["provenance"]["command"] and told["provenance"]["date"] and told["provenance"]["versions"]
    assert plot.stat().st_size > 1000
    for word in ("tiny, batch, temperature 0", "tiny, stream", "graphs are off", "needs an accelerator", "Same text"):
        assert word in result.stdout
    assert result.stdout.count("graphs are off") == 1
    assert "none and chain:depth=2 ran on the host loop: graphs are off" in result.stdout
    printed = json.loads(windfall(*at, "--no-hf", "--arrivals", "batch", "--json").stdout)
    assert [row["concurrency"] for row in printed["rows"]] == [1, 1, 2, 2]


def test_results_are_shown_and_drawn_again(folder: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "throughput.json", tmp_path / "again.png"
    at = ("bench", "throughput", "--out", out)
    first = windfall(*at, "--target", folder, *SHORT.split(), "--no-hf", "--concurrency", "1", "--arrivals", "batch")
    written = out.read_text()
    again = windfall(*at, "--draw", "--plot", plot)
    assert again.exit_code == 0 and again.stdout == first.stdout and out.read_text() == written
    assert json.loads(written)["provenance"]["date"].encode() in plot.read_bytes()
    assert json.loads(windfall(*at, "--draw", "--json").stdout) == json.loads(written)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "has no results of windfall bench throughput"), (None, "cannot read")],
)
def test_only_results_can_be_drawn_again(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "throughput.json"
    if text is not None:
        file.write_text(text)
    said = refused("bench", "throughput", "--draw", "--out", file)
    assert message in said and said.count(file.name) == 1
    assert "name their file with --out" in refused("bench", "throughput", "--draw")


def test_another_text_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = contest.Contest._write_references

    def spoil(self: Any, temperature: float) -> None:
        write(self, temperature)
        self.wanted[temperature, 0] = (1, 2, 3)

    monkeypatch.setattr(contest.Contest, "_write_references", spoil)
    result = windfall("bench", "throughput", "--target", folder, *SHORT.split(), "--no-hf", "--concurrency", "1")
    assert result.exit_code == 1 and "conversations differ from plain decoding" in result.stdout


def test_ctrl_c_keeps_what_is_finished(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, keep, runs = tmp_path / "throughput.json", contest.Contest._keep, []

    def stop(*given: Any) -> None:
        runs.append(given)
        if len(runs) == 2:
            raise KeyboardInterrupt
        keep(*given)

    monkeypatch.setattr(contest.Contest, "_keep", stop)
    at = ("bench", "throughput", "--target", folder, *SHORT.split(), "--no-hf", "--concurrency", "1", "--out", out)
    result = windfall(*at)
    assert result.exit_code == 130 and "finished measurements are kept" in result.stderr
    told = json.loads(out.read_text())
    assert not told["finished"] and [row["method"] for row in told["rows"]] == ["none"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--methods nonsense", "nonsense"),
        ("--concurrency many", "write --concurrency as numbers separated by commas, for example 1,8,32, not 'many'"),
        ("--concurrency 0,2", "--concurrency takes different numbers of requests, each at least 1, for example 1,8,32"),
        ("--concurrency 2,2", "--concurrency takes different numbers of requests, each at least 1, for example 1,8,32"),
        ("--temperature 0,0", "give each temperature once, for example 0,1"),
        ("--arrivals later", "--arrivals takes batch and stream, not 'later'"),
        ("--arrivals batch,batch", "give each of --arrivals once, for example batch,stream"),
        ("--tasks nothing", "there is no task 'nothing'"),
        ("--plot speed.txt", "a plot is a .png, .svg, .pdf file"),
        ("--max-new-tokens 600", "no prompt fits the context of tiny with 600 new tokens"),
    ],
)
def test_bad_input_is_refused_in_one_line(folder: Path, options: str, message: str) -> None:
    assert message in refused("bench", "throughput", "--target", folder, "--no-hf", *options.split())
