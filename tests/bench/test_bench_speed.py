"""`windfall bench speed`, on tiny random models: every table is filled, and what is compared is what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.cli import character_tokenizer, folder, refused, windfall
from helpers.random_heads import random_head
from helpers.tiny import prompt, tiny
from helpers.widen import LARGER
from windfall.bench.methods import DrafterSpec, parse_methods
from windfall.bench.runner import Case, Contender, State, assemble, first_questions
from windfall.bench.speed import passes, race, speed
from windfall.bench.speed.profiled import Kernel, after
from windfall.bench.speed.race import Entry, Race, Regime, Settings, Timing
from windfall.bench.speed.speed import Result
from windfall.bench.tasks import Prompt
from windfall.core.types import GpuOptions, InputError, SamplingParams
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import Costs
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target

__all__ = ["folder"]  # the fixture
PROMPTS = [Prompt("talk", "", "one", ("tell me a story",)), Prompt("other", "", "two", ("a b a b a b",))]
SHORT = {"max_new_tokens": 4, "rounds": 2, "lengths": (16, 64), "rows": (1, 64), "ignore_eos": True}
COSTS = Costs.simple(0.001, (1, 2, 8), (1.0, 1.1, 1.5), 0.1)
FLAT = Costs.simple(0.01, (1, 96), (1.0, 1.1))  # seconds: whatever runs here is faster


@pytest.fixture(scope="module")
def module_patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def measured(module_patch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A whole measurement with a head on fixed buffers, and what was kept on the way."""
    module_patch.setattr(passes, "DRAFT_PASSES", 2)
    module_patch.setattr(passes, "CONTEXT_TOKENS", 32)
    target = Target(tiny(), character_tokenizer(), "tiny")
    kept: list[dict[str, Any]] = []
    result = Result(target.name, {}, {})

    def attach(contenders: Any) -> dict[str, Any]:
        for each in contenders:
            each.engine.costs = COSTS
        return {"head": {"costs": COSTS.as_dict()}}

    speed.measure(
        result,
        target,
        parse_methods(["beam:depth=3:k=3:nodes=8,auto"]),
        speed.Ready("head", {}, random_head()),
        PROMPTS,
        Settings(gpu_options=GpuOptions(graphs=True), hf_limit=1, hf_tokens=4, **SHORT),
        attach,
        lambda found: kept.append(json.loads(json.dumps(found.as_dict()))),
    )
    return kept[-1], kept


def test_the_memory_of_a_method_is_that_of_an_engine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    target, head, made = Target(tiny(), character_tokenizer()), random_head(), []
    monkeypatch.setattr(speed, "peak_apart", lambda target, make, ids, params: made.append(make()) or 1000)
    case, drafter = Case(PROMPTS[0], [1, 2], SamplingParams()), speed.Ready("head", {}, head)
    plain, beam = (
        speed.peak_of(target, method, drafter, case, Settings(**SHORT)) for method in parse_methods(["none,beam"])
    )
    assert (plain, beam) == (1000, 1000 + passes.size_of(head))  # the head was there before
    assert [type(engine.policy).__name__ for engine in made] == ["NoSpeculation", "Beam"]


def test_every_method_is_measured_in_every_regime(measured: Any) -> None:
    told, kept = measured
    ours = ["none", "beam:depth=3:k=3:nodes=8", "auto"]
    theirs = ["HF generate", "HF assisted, prompt lookup of 10"]
    found = [(row["method"], row["temperature"], row["coupled"]) for row in told["methods"]]
    greedy, coupled = ([(name, heat, how) for name in ours] for heat, how in ((0, None), (1, True)))
    uncoupled = [(name, 1, False) for name in ours[1:]]
    assert found == [
        *greedy,
        *coupled,
        *uncoupled,
        *((name, 0, None) for name in theirs),
        *((name, 1, True) for name in theirs),
    ]
    assert told["finished"] and not kept[0]["finished"]
    assert [len(each["methods"]) for each in kept[:4]] == [0, 1, 2, 3]  # kept after every turn


def test_a_row_has_all_its_figures(measured: Any) -> None:
    told, _ = measured
    rows = [row for row in told["methods"] if row["method"] == "HF generate"]
    generate = {row["temperature"]: row["tokens_per_second"] for row in rows}  # 0 if it took a blink, all of it prefill
    for row in told["methods"]:
        theirs = row["method"].startswith("HF")
        speed, base = row["tokens_per_second"], generate[row["temperature"]]
        assert row["rounds"] == 2 and row["tokens_per_second_with_prefill"] > 0 and (speed or theirs)
        assert row["over_none"] > 0 if speed else row["over_none"] is None
        assert row["over_hf"] > 0 if speed and base else row["over_hf"] is None
        assert set(row["tasks"]) == {"talk", "other"}
        speeds = [task["tokens_per_second"] for task in row["tasks"].values()]
        assert all(
            speed is None if theirs and not speed else speed > 0 for speed in speeds
        )  # a blink, all of it prefill
        assert row["peak_bytes"] is None and row["inside"] is None  # told by CUDA alone
        if theirs:
            assert row["split"] is None and row["tau"] is None
            continue
        split = row["split"]
        assert all(split[f"{part}_ms"] >= 0 for part in ("draft", "verify", "policy", "other", "host"))
        assert split["verify_ms"] > 0 and 0 <= split["rest_share"] <= 1
        assert (split["draft_ms"] > 0.05) == (row["method"] != "none")  # marks alone take a microsecond
        assert row["tau"] >= 1 and (row["tau"] == 1 or row["method"] != "none")
    plain = [row for row in told["methods"] if row["method"] == "none"]
    assert all(row["over_none"] == 1 for row in plain)


def test_texts_equal_plain_decoding(measured: Any) -> None:
    for row in measured[0]["methods"]:
        if row["method"].startswith("HF") and row["temperature"]:
            assert row["texts"] is None  # other noise, another text
        else:
            assert row["same_texts"] == row["texts"] > 0, row["method"]


@pytest.mark.parametrize("timed", [True, False])
def test_untimed_answers_learn_nothing_from_the_clock(timed: bool) -> None:
    (method,) = parse_methods(["auto"])[1:]
    made = Engine(Target(tiny()), FeatureHeadDrafter(random_head()), method.make(), gpu_options=GpuOptions(graphs=True))
    made.costs = FLAT
    entry = Entry("auto", Regime(0.0, True), Contender(method, made, None))
    race = Race(made.target, [entry], [], Settings())
    entry.state = State(method.make(), {"greedy": Calibrator()})
    race._generate(entry, Case(PROMPTS[0], prompt(), SamplingParams(max_new_tokens=24, eos=())), timed)
    gains = [each.speedup for each in made.calibrators.values()]
    assert made.fallback == "" and (gains == [1.0]) is not timed


def test_each_method_has_its_own_reason_to_leave_the_gpu() -> None:
    """Methods with one drafter have one engine."""
    methods = parse_methods(["salf:nodes=8,salf:nodes=8:fill=False"])
    target = Target(tiny(), character_tokenizer(), "tiny")
    ready = speed.Ready("head", {}, random_head())
    contenders = assemble(methods, target, ready, True, gpu_options=GpuOptions(graphs=True))
    for each in contenders:
        each.engine.costs = COSTS
    settings = Settings(**{**SHORT, "rounds": 1, "hf": False, "temperatures": (0.0,)})
    cases = first_questions(PROMPTS, contenders[0].engine, 0, max_new_tokens=4, eos=())
    made = Race(target, race.entries(contenders, settings, None), cases, settings)
    list(made.run())
    told = [row["fallback"] for row in made.rows]
    assert told == [None, None, "it verifies nodes by their order, on the host"]


def test_different_texts_are_counted() -> None:
    greedy, cases = Regime(0.0, True), [Case(prompt, [1], SamplingParams()) for prompt in PROMPTS]
    wanted, other = Timing("talk", (1, 2), 1.0, 1, 1, 0.5), Timing("talk", (1, 3), 1.0, 1, 1, 0.5)
    plain, beam = (Entry(label, greedy, contender=object()) for label in ("none", "beam"))  # type: ignore[arg-type]
    plain.rounds, beam.rounds = [[wanted, wanted]], [[wanted, other], [other, other]]
    rows = Race(None, [plain, beam], cases, Settings()).rows  # type: ignore[arg-type]
    assert [(row["same_texts"], row["texts"]) for row in rows] == [(2, 2), (1, 4)]


def test_passes_are_timed_by_rows_and_by_context(measured: Any) -> None:
    told, _ = measured
    passes, memory = told["passes"], told["memory"]
    assert [row["rows"] for row in passes["rows"]] == [1, 64]
    assert [(row["length"], row["rows"]) for row in passes["lengths"]] == [(16, 1), (16, 64), (64, 1), (64, 64)]
    for row in [*passes["rows"], *passes["lengths"]]:
        assert row["bytes"] == memory["target_bytes_read"] + row["length"] * memory["row_bytes"]
        assert row["floor_seconds"] == pytest.approx(row["bytes"] / memory["bandwidth"])
        assert row["over_floor"] == pytest.approx(row["seconds"] / row["floor_seconds"])
    assert all(row["verify_seconds"] > 0 for row in passes["rows"])
    assert (
        passes["rows"][0]["over_first"] == passes["lengths"][0]["over_first"] == passes["lengths"][1]["over_first"] == 1
    )
    assert passes["draft"]["first_seconds"] > 0 and passes["launches"] == {}


def test_what_a_pass_reads() -> None:
    model, tied = tiny(), tiny(tie_word_embeddings=True)
    embedding = 61 * 32 * 4
    assert passes.weights_read(model) == sum(each.numel() for each in model.parameters()) * 4 - embedding
    assert passes.weights_read(tied) == sum(each.numel() for each in tied.parameters()) * 4


def test_lengths_past_the_context_need_rotary_positions() -> None:
    assert passes.usable_lengths(Target(tiny()), (64, 512)) == ([64, 512], [512])
    assert passes.usable_lengths(Target(tiny("gpt2")), (64, 512)) == ([64], [])


def test_kernels_are_sorted_into_models_and_the_rest() -> None:
    names = {
        "sm90_xmma_gemm_bf16": True,
        "_attend": True,
        "_add_norm": True,
        "_pick_children": True,
        "_grow": False,
        "Memcpy DtoH": False,
    }
    assert {name: Kernel(name, 1, 0.1).model for name in names} == names
    assert Kernel("Memcpy DtoH (Device -> Pinned)", 1, 0.1).copies and not Kernel("_choose", 1, 0.1).copies


def test_kernels_of_the_first_cycle_are_subtracted() -> None:
    first, whole = [Kernel("a", 2, 0.5), Kernel("b", 1, 0.2)], [Kernel("a", 7, 0.9), Kernel("c", 3, 0.7)]
    left = after(first, [*whole, Kernel("b", 1, 0.1)])
    assert [each.name for each in left] == ["c", "a", "b"]
    assert [each.count for each in left] == [3, 5, 0]
    assert [each.seconds for each in left] == pytest.approx([0.7, 0.4, 0.0])


def test_everything_is_timed_before_the_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel launches are slower once the profiler has run."""
    done: list[str] = []

    def noting(what: str, result: Any) -> Any:
        return lambda *_: done.append(what) or result

    for name in ("_warm_up", "_answer"):
        monkeypatch.setattr(Race, name, noting("timed", []))
    monkeypatch.setattr(race, "unobserved", noting("timed", 1.0))
    monkeypatch.setattr(race, "inside", noting("looked", {}))
    target, own = SimpleNamespace(device=torch.device("cuda")), SimpleNamespace()
    entries = [Entry(label, Regime(0.0, True), own) for label in ("none", "beam")]  # type: ignore[arg-type]
    steps: list[tuple[int, int]] = []
    case = Case(PROMPTS[0], [1], SamplingParams())
    run = Race(target, [*entries, Entry("HF generate", Regime(0.0, True))], [case], Settings(rounds=2)).run  # type: ignore[arg-type]
    assert len(list(run(lambda *step: steps.append(step)))) == 7
    assert done == 11 * ["timed"] + 2 * ["looked"]
    assert steps[-1] == (11, 11)


def test_widened_pairs_are_named_as_such() -> None:
    target = Target(tiny(), character_tokenizer(), "some/tiny")
    head = speed.Ready("head", {}, random_head())
    wide, drafter = speed.widened(target, head, LARGER)  # type: ignore[arg-type]
    assert wide.name == "tiny widened to a larger shape's cost"
    assert isinstance(drafter.make(), FeatureHeadDrafter) and drafter.label == "head"
    plain, same = speed.widened(target, DrafterSpec("ngram"), LARGER)  # type: ignore[arg-type]
    assert plain.name == wide.name and same.name == "ngram"
    assert plain.decoder.config.hidden_size == LARGER.hidden


def test_the_command_fills_tables_file_and_plot(folder: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "new" / "speed.json", tmp_path / "speed.png"
    options = (
        "--methods chain:depth=2 --limit 1 --max-new-tokens 6 --rounds 1 --lengths 16 --temperature 0 --ignore-eos"
    )
    result = windfall("bench", "speed", "--target", folder, *options.split(), "--out", out, "--plot", plot)
    assert result.exit_code == 0
    told = json.loads(out.read_text())
    assert told["finished"] and told["target"] == "tiny" and told["settings"]["methods"] == ["none", "chain:depth=2"]
    assert told["provenance"]["drafters"]["ngram"]["class"].endswith("NGramDrafter")
    assert told["provenance"]["target"]["exact"] is False  # on a CPU
    assert plot.stat().st_size > 1000
    for word in ("tiny, temperature 0", "HF", "verify pass by rows", "verify pass by context", "GB/s"):
        assert word in result.stdout


def test_ctrl_c_keeps_what_is_finished(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, answers = tmp_path / "speed.json", []

    def stop(*given: Any) -> Any:
        answers.append(given)
        if len(answers) > 4:  # two to warm up with, two that count
            raise KeyboardInterrupt
        return own(*given)

    own = Race._answer
    monkeypatch.setattr(Race, "_answer", stop)
    options = "--methods chain:depth=2 --limit 1 --max-new-tokens 4 --rounds 2 --lengths 16 --temperature 0 --no-hf"
    result = windfall("bench", "speed", "--target", folder, *options.split(), "--out", out)
    assert result.exit_code == 130 and "finished measurements are kept" in result.stderr
    told = json.loads(out.read_text())
    assert not told["finished"] and len(told["methods"]) == 2 and told["passes"]["rows"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--methods nonsense", "nonsense"),
        ("--temperature warm", "write --temperature as numbers separated by commas, for example 0,1, not 'warm'"),
        ("--temperature 0,0", "give each temperature once, for example 0,1"),
        ("--lengths 512,x", "write --lengths as numbers separated by commas, for example 512,2048, not '512,x'"),
        ("--lengths 0", "context lengths are at least 1, not 0"),
        ("--tasks nothing", "there is no task 'nothing'"),
        ("--widen llama-9b", "there is no shape 'llama-9b'"),
        ("--plot speed.txt", "a plot is a .png, .svg, .pdf file"),
        ("--max-new-tokens 600", "no prompt fits the context of tiny with 600 new tokens"),
    ],
)
def test_bad_input_is_refused_in_one_line(folder: Path, options: str, message: str) -> None:
    assert message in refused("bench", "speed", "--target", folder, "--no-hf", *options.split())


def test_regimes() -> None:
    assert [each.label for each in Settings().regimes] == ["T=0", "T=1 coupled", "T=1 uncoupled"]
    assert [each.label for each in Settings(couplings=(False,)).regimes] == ["T=0", "T=1 uncoupled"]
    with pytest.raises(InputError, match="1 to 320 rows"):
        Settings(rows=(321,))
