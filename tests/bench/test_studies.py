"""Studies: every one names methods that exist, runs on a tiny model, goes on where it stopped, and draws its figure."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from helpers.bench_records import write_run
from helpers.cli import character_tokenizer
from helpers.tiny import tiny
from windfall.bench import reading, results
from windfall.bench.methods import Method, parse_method, parse_methods
from windfall.bench.papers import studies
from windfall.bench.papers.studies import STUDIES, Leg, Study
from windfall.bench.runner import Settings
from windfall.bench.tasks import Prompt
from windfall.cli import app
from windfall.core.types import InputError
from windfall.model.target import Target

NAMES = [
    *("salf-threshold", "talf-k", "talon-mu", "talon-budget", "talon-init", "talon-temperature", "gt-c"),
    *("gt-temperature", "dynatree-ablation", "length", "prompt-length", "fixed-tree", "grid"),
    *("time-by-depth-and-rows", "delta-tau"),
]
TWO = ("ngram", "self")
PROMPTS = [Prompt("letters", "", str(place), (text,)) for place, text in enumerate(("count to ten", "sing a song"))]


def drafters(study: Study) -> tuple[str, ...]:
    return TWO if study.drafters else ()


def test_every_study_is_there() -> None:
    assert list(STUDIES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_methods_are_valid_and_drawn_from_records(name: str, tmp_path: Path) -> None:
    study, place, count = STUDIES[name], tmp_path / "study", 0
    assert len({leg.name for leg in study.legs}) == len(study.legs)
    for leg in study.legs:
        methods = parse_methods(study.contenders(leg, drafters(study)))
        assert len(methods) > 2 and methods[0].plain
        settings = {"temperatures": study.temperatures, **leg.settings}
        Settings(methods=tuple(method.label for method in methods), tasks=("builtin",), **settings)
        write_run(place / leg.name, made_up(methods), {"a": "b"}, study.temperatures, texts=1, repeats=1)
        count += len(methods)
    files = studies.draw(study, place)
    assert [file.name for file in files] == [f"{name}.svg", f"{name}.png", f"{name}.csv"]
    ElementTree.fromstring(files[0].read_text("utf-8"))
    lines = list(csv.DictReader(files[2].open(encoding="utf-8")))
    assert len(lines) == count * len(study.temperatures)
    if study.across and name not in ("talf-k", "delta-tau"):
        assert all(line["x"] for line in lines if line["method"] != "none")
    first = reading.load(place / study.legs[0].name)
    taus = {(row.method, row.temperature): row.tau for row in results.summary(first)}
    assert all(
        float(line["tau"]) == taus[line["method"], float(line["temperature"])]
        for line in lines[: count // len(study.legs)]
    )


def made_up(methods: Sequence[Method]) -> dict[str, tuple[str, str, float, int, int]]:
    """Each method with its drafter, policy, acceptance rate, depth and rows, for bench_records."""
    found = {}
    for place, method in enumerate(methods):
        plain = method.policy == "none"
        found[method.label] = (
            ("none", "none", 0.0, 0, 1) if plain else ("self", method.policy, 0.5 + 0.002 * place, 4, 30)
        )
    return found


def test_points_of_a_sweep_are_in_order() -> None:
    method = parse_method("salf:th=0.3")
    assert method.settings == {"th": "0.3"}
    assert studies.expand("beam:depth=8:nodes=20|40") == ["beam:depth=8:nodes=20", "beam:depth=8:nodes=40"]
    assert studies.expand("a:b=1|2:c=3|4") == ["a:b=1:c=3", "a:b=1:c=4", "a:b=2:c=3", "a:b=2:c=4"]
    assert studies.expand("talon") == ["talon"]


def test_runs_on_a_model_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    legs = (Leg("tokens-4", {"max_new_tokens": 4}, x=4), Leg("tokens-8", {"max_new_tokens": 8}, x=8))
    study = Study("tiny", "Tiny", "", ("chain:depth=2", "beam:depth=2:k=2"), studies._lines, "tokens", legs=legs)
    target = Target(tiny(), character_tokenizer(), "tiny")
    common = {"tasks": ("letters",), "repeats": 1, "warm_up": 1}
    shares: list[float] = []
    studies.run(study, tmp_path, common, PROMPTS, target, ["self"], shares.append)
    assert shares == sorted(shares) and shares[-1] == 1
    records = [tmp_path / leg.name / reading.RECORDS_FILE for leg in legs]
    before = [file.read_bytes() for file in records]
    assert [text.count(b"\n") for text in before] == [6, 6]
    records[1].write_bytes(b"".join(before[1].splitlines(keepends=True)[:2]))
    studies.run(study, tmp_path, common, PROMPTS, target, ["self"])
    assert records[0].read_bytes() == before[0] and records[1].read_bytes().count(b"\n") == 6
    found = studies.points(study, tmp_path)
    assert {(point.series, point.x) for point in found if point.series != "none"} == {
        (name, x) for name in study.methods for x in (4, 8)
    }
    assert not results.differences(reading.load(tmp_path / "tokens-8"))


def test_every_leg_has_the_same_prompts() -> None:
    target = Target(tiny(), character_tokenizer(), "tiny")  # a context of 256, and a token for a letter
    study = replace(STUDIES["prompt-length"], texts=True)
    long, short = (Prompt("t", "", name, (name * 40,), raw=True) for name in ("long", "s"))

    def chosen(*legs: dict[str, int]) -> list[Prompt]:
        settings = [Settings(("none",), ("t",), **leg) for leg in legs]
        return studies.shared_prompts(study, [long, short], target, settings)

    assert chosen({"prompt_tokens": 20}, {"prompt_tokens": 100}) == [long]  # the other is too short for the second
    assert chosen({"prompt_tokens": 20}, {"prompt_tokens": 30}) == [long, short]
    with pytest.raises(InputError, match="no prompt leaves room"):
        chosen({"prompt_tokens": 20}, {"prompt_tokens": 200})
    with pytest.raises(InputError, match="is about times"):
        studies.run(STUDIES["time-by-depth-and-rows"], Path("nowhere"), {"timing": False}, [], target)


def test_long_texts_are_made_of_all_prompts() -> None:
    raw = Prompt("story", "", "1", ("Once upon a time",), raw=True)
    made = studies.long_texts([*PROMPTS, raw])
    assert made[2] is raw and all(prompt.raw for prompt in made)
    assert made[1].turns == ("sing a song\n\nOnce upon a time\n\ncount to ten",)


def test_the_command_lists_and_refuses(tmp_path: Path) -> None:
    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["bench", "study", *words])
        return result.exit_code, result.output

    code, text = run()
    assert code == 0 and all(name in text for name in NAMES)
    for words, reason in (
        (("nothing",), "choose from"),
        (("grid",), "--out DIR"),
        (("grid", "--out", str(tmp_path), "--draw"), "not the folder of a benchmark"),
        (("talf-k", "--out", str(tmp_path)), "at least two"),
        (("grid", "--out", str(tmp_path), "--drafter", "ngram", "--drafter", "self"), "one --drafter, not 2"),
        (("grid", "--out", __file__), "cannot make the folder"),
        (("grid", "--out", str(tmp_path), "--tasks", "a,,b"), "separated by commas"),
    ):
        code, text = run(*words)
        assert code == 2 and reason in text and len(text.splitlines()) == 1


def test_another_run_is_not_drawn(tmp_path: Path) -> None:
    place = write_run(tmp_path / "run", {"none": ("none", "none", 0.0, 0, 1)}, {"a": "b"}, (0.0,), texts=1, repeats=1)
    about = json.loads((place / "run.json").read_text())
    (place / "run.json").write_text(json.dumps(about | {"settings": {**about["settings"], "suite": None}}))
    with pytest.raises(InputError, match="holds another run, not one of study talon-mu"):
        studies.draw(STUDIES["talon-mu"], place)


def test_an_unfinished_study_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {"none": ("none", "none", 0.0, 0, 1)}, {"a": "b"}, (0.0,), texts=1, repeats=1)
    with pytest.raises(InputError, match="no finished conversation"):
        studies.draw(STUDIES["talon-mu"], tmp_path / "run")
