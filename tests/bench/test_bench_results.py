"""The metrics, on records small enough to work out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windfall.bench import reading, results
from windfall.bench.reading import Record, Run, Turn
from windfall.bench.results import Difference
from windfall.core.stats import Estimate
from windfall.core.types import InputError


def turn(committed: list[int], accepted: list[int] | None = None, **more: Any) -> dict[str, Any]:
    cycles = len(committed)
    accepted = [n - 1 for n in committed] if accepted is None else accepted
    empty = {"rows": [1] * cycles, "drafted": [0] * cycles, "passes": [0] * cycles, "depth": [0] * cycles, "nodes": []}
    said = {"prompt_tokens": 9, "tokens": sum(committed), "digest": "same", "finish": "length"}
    return {**said, "committed": committed, "accepted": accepted, **empty, **more}


def record(method: str, *turns: dict[str, Any], **more: Any) -> Record:
    about = {"drafter": "ngram", "policy": method, "settings": {}, "task": "t", "category": "c", "id": "1"}
    rest = {"temperature": 0.0, "repeat": 0, "seed": 0, "coupled": True, "repeated": 0.0, "peak_memory": None}
    return Record.of_dict({"method": method, **about, **rest, "turns": list(turns), **more})


def timed(method: str, id: str, tokens: int, seconds: float, repeat: int = 0, **more: Any) -> Record:
    return record(method, turn([1] * tokens, seconds=seconds), id=id, repeat=repeat, **more)


def run_of(*records: Record) -> Run:
    return Run("made-up", {}, {}, {}, list(records))


# ---- tokens per pass and acceptance


def test_tau_has_three_variants() -> None:
    records = [record("beam", turn([4, 4])), record("beam", turn([1, 1, 1, 1], accepted=[0, 0, 0, 3]), turn([2]))]
    assert results.tau(records) == 14 / 7
    assert results.tau(records, "samples") == (4 + 6 / 5) / 2
    assert results.tau(records, "cycles") == (4 + 4 + 1 + 1 + 1 + 4 + 2) / 7  # the last cycle as if it were not cut
    assert math.isnan(results.tau([]))


def test_passes_rows_and_lengths() -> None:
    records = [
        record("beam", turn([3, 1], passes=[2, 3], rows=[10, 20], drafted=[15, 25])),
        record("beam", turn([3], passes=[1], rows=[6], drafted=[5]), id="2"),
    ]
    assert results.delta(records) == 2
    assert results.mean_rows(records) == 12
    assert results.accepted_lengths(records) == {("t", "1"): [3, 1], ("t", "2"): [3]}
    assert results.length_histogram(records) == {1: 1, 3: 2}
    assert results.acceptance_per_node(records) == 4 / (9 + 19 + 5)
    assert results.acceptance_per_node(records, of="drafted") == 4 / 45
    assert math.isnan(results.acceptance_per_node([record("none", turn([1]))]))


NODES = [[1, 0, 0, 4, 4, 2], [1, 1, 1, 4, 4, 1], [2, 0, 0, 3, 2, 1], [2, 0, 1, 2, 1, 0], [2, 1, 2, 1, 1, 0]]


def test_acceptance_by_position_and_rank() -> None:
    records = [record("beam", turn([1] * 5, nodes=NODES, tried=[4, 3])), record("beam", turn([1], nodes=[], tried=[]))]
    assert results.acceptance_by_position(records) == {1: 3 / 4, 2: 1 / 3}
    assert results.acceptance_by_rank(records) == {0: 3 / 7, 1: 1 / 5}
    assert results.rank_share(records) == {0: 9 / 14, 1: 5 / 14}
    assert results.heat_map(records) == {(1, 0): 2, (1, 1): 1, (2, 0): 1, (2, 1): 0}
    assert results.heat_map(records, by="layer_rank") == {(1, 0): 2, (1, 1): 1, (2, 0): 1, (2, 1): 0, (2, 2): 0}
    assert results.heat_map(records, what="verified")[2, 0] == 5


@pytest.mark.parametrize(
    ("policy", "settings", "expected"),
    [
        ("chain", {"depth": 8}, 4 / 8),
        ("fixed-tree", {"depth": 8}, 4 / 10),
        ("dynatree", {"base_depth": 5}, 4 / 7),
        ("beam", {"depth": 8}, None),
    ],
)
def test_dynatrees_acceptance(policy: str, settings: dict[str, int], expected: float | None) -> None:
    assert results.dynatree_accept([record(policy, turn([4, 4]), settings=settings)]) == expected


def test_dynatrees_acceptance_is_the_mean_of_the_texts() -> None:
    """Its Table 3: 7.05 / 8 makes 88.2% of a chain of 8, and not 6.82 / 8."""
    texts = [record("chain", turn(counts), settings={"depth": 5}) for counts in ([4, 4], [1])]
    assert results.tau(texts) == 3 and results.dynatree_accept(texts) == (4 + 1) / 2 / 5


# ---- time


def test_speedup_has_three_variants() -> None:
    plain = [timed("none", "a", 10, 10.0), timed("none", "b", 30, 10.0)]  # 1 and 3 tokens a second
    fast = [timed("beam", "a", 10, 2.0), timed("beam", "b", 30, 6.0)]  # 5 and 5
    value = {variant: results.speedup(fast, plain, variant).value for variant in ("totals", "ratios", "rates")}
    assert value == pytest.approx({"totals": 20 / 8, "ratios": (5 + 5 / 3) / 2, "rates": 5 / 2})


def test_prompts_are_paired_and_repeats_added_up() -> None:
    plain = [timed("none", "a", 10, 4.0, repeat) for repeat in (0, 1)] + [timed("none", "b", 10, 1.0)]
    fast = [timed("beam", "a", 10, 1.0, 0), timed("beam", "a", 10, 3.0, 1), timed("beam", "c", 10, 1.0)]
    assert results.speedup(fast, plain) == Estimate(2.0, 2.0, 2.0)  # of prompt a alone
    assert results.speedup([timed("beam", "a", 10, 1.0, temperature=1.0)], plain) is None


def test_intervals_are_seeded_and_narrow_with_prompts() -> None:
    def width(count: int) -> float:
        noise = np.random.default_rng(7).uniform(0.5, 1.5, count)
        plain = [timed("none", str(n), 10, 2.0) for n in range(count)]
        fast = [timed("beam", str(n), 10, float(noise[n])) for n in range(count)]
        found = results.speedup(fast, plain)
        assert found == results.speedup(fast, plain)
        assert found.low < found.value < found.high
        return found.high - found.low

    assert width(100) < width(10) / 2
    steady = [timed("beam", str(n), 10, 1.0) for n in range(5)]
    assert results.speedup(steady, [timed("none", str(n), 10, 2.0) for n in range(5)]) == Estimate(2.0, 2.0, 2.0)


def test_latency_split_and_prediction() -> None:
    split = {"draft": 1.0, "verify": 2.0, "policy": 0.5, "other": 0.1}
    fast = [record("beam", turn([4, 4], passes=[2, 3], seconds=4.0, ttft=1.0, prefill=0.4, split=split))]
    plain = [record("none", turn([1] * 8, seconds=8.0, ttft=1.0, prefill=0.4, split={**split, "verify": 4.0}))]
    assert results.ttft(fast) == 1.0
    assert results.tpot(fast) == 3.0 / 7
    assert results.tokens_per_second(fast) == 2.0
    assert results.time_split(fast) == pytest.approx(
        {"prefill": 0.1, "draft": 0.25, "verify": 0.5, "policy": 0.125, "other": 0.025}
    )
    assert results.cycle_throughput(fast) == 8 / 3
    assert results.cost_ratio(fast, plain) == (1.0 / 5) / (4.0 / 8)
    assert results.predicted_speedup(fast, plain) == 4 / (1 + 0.4 * 2.5)
    assert results.cost_ratio(plain, plain) is None  # nothing was drafted


def test_what_was_not_timed_is_none() -> None:
    records = [record("beam", turn([2])), record("none", turn([1]))]
    for figure in (results.ttft, results.tpot, results.tokens_per_second, results.time_split, results.cycle_throughput):
        assert figure(records) is None
    assert results.peak_memory(records) is None
    for compared in (results.speedup, results.cost_ratio, results.predicted_speedup, results.memory_to_speed):
        assert compared(records[:1], records[1:]) is None


def test_memory() -> None:
    fast = [timed("beam", "a", 10, 1.0, peak_memory=2**30), timed("beam", "b", 10, 1.0, peak_memory=2**31)]
    plain = [timed("none", "a", 10, 3.0), timed("none", "b", 10, 3.0)]
    assert results.peak_memory(fast) == 2**31
    assert results.memory_to_speed(fast, plain) == 1.5


# ---- texts, summary, reading


def test_differences_name_the_first_turn() -> None:
    same, other = turn([1]), turn([1], digest="other")
    found = results.differences(
        run_of(
            record("none", same, same, id="1"),
            record("chain", same, same, id="1"),
            record("beam", same, other, id="1"),
            record("salf", same, id="1"),
            record("beam", other, id="2"),  # plain decoding has not come to it yet
        )
    )
    assert found == [Difference("beam", "t", "1", 0.0, 0, 2), Difference("salf", "t", "1", 0.0, 0, 2)]


def test_summary_has_a_row_for_everything() -> None:
    made = run_of(
        *(
            timed(method, "1", 10, seconds, task=task, temperature=temperature)
            for method, seconds in (("none", 2.0), ("beam", 1.0))
            for task in ("a", "b")
            for temperature in (0.0, 1.0)
        )
    )
    rows = {(row.method, row.task, row.temperature): row for row in results.summary(made)}
    assert len(rows) == 2 * 3 * 2
    pooled = rows["beam", "all", 1.0]
    assert (pooled.prompts, pooled.samples, pooled.tokens) == (2, 2, 20)
    assert pooled.speedup == Estimate(2.0, 2.0, 2.0)
    assert rows["none", "a", 0.0].speedup == Estimate(1.0, 1.0, 1.0)
    told = json.loads(json.dumps(pooled.as_dict(), allow_nan=False))
    assert told["speedup"] == {"value": 2.0, "low": 2.0, "high": 2.0}
    assert told["acceptance"] is None and told["tau"] == 1.0
    assert len(results.summary(run_of(*made.select(task="a")))) == 2 * 2  # one task needs no pool


def test_summary_counts_different_texts() -> None:
    made = run_of(
        record("none", turn([1])), record("beam", turn([1], digest="other")), record("none", turn([1]), task="u")
    )
    rows = {(row.method, row.task): row.different for row in results.summary(made)}
    assert rows == {("none", "t"): 0, ("none", "u"): 0, ("beam", "t"): 1, ("none", "all"): 0, ("beam", "all"): 1}
    assert {row.method: row.compared for row in results.summary(made) if row.task == "all"} == {"none": 0, "beam": 1}


def write(folder: Path, lines: list[str], about: object) -> None:
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "records.jsonl").write_text("\n".join(lines))


def test_reading_a_folder(tmp_path: Path) -> None:
    rows = [
        {k: v for k, v in vars(record(method, id="1")).items() if k != "turns"} | {"turns": [turn([2, 1])], "extra": 1}
        for method in ("beam", "none")
    ]
    lines = [json.dumps(row) for row in rows]
    write(tmp_path, [*lines, lines[0][:50]], {"settings": {"methods": ["none", "beam"]}, "provenance": {"date": "d"}})
    made = reading.load(tmp_path)
    assert made.methods == ["none", "beam"]  # as they were asked for; the torn line is left out
    assert made.records[0].turns[0] == Turn.of_dict(turn([2, 1]))
    assert made.name == tmp_path.name and made.provenance == {"date": "d"}


@pytest.mark.parametrize(
    ("apart", "peaks", "wanted"),
    [(False, None, 7), (True, None, None), (True, {"beam": 5}, 5), (True, {"none": 5}, None)],
)
def test_peak_memory_of_a_folder(apart: bool, peaks: dict[str, int] | None, wanted: int | None, tmp_path: Path) -> None:
    """A run that ended before says nothing about it: what all methods held together is no method's own."""
    line = json.dumps(vars(record("beam", id="1")) | {"turns": [turn([2, 1])], "peak_memory": 7})
    write(tmp_path, [line, ""], {"settings": {"methods": ["beam"], "memory": apart}, "provenance": {}})
    if peaks:
        (tmp_path / reading.PEAKS_FILE).write_text(json.dumps(peaks))
    assert reading.load(tmp_path).records[0].peak_memory == wanted


def test_folders_that_hold_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not the folder of a benchmark: it has no readable run\.json"):
        reading.load(tmp_path)
    write(tmp_path, ["{nonsense", ""], {"settings": {"methods": []}, "provenance": {}})
    with pytest.raises(InputError, match="holds a damaged"):
        reading.load(tmp_path)
    write(tmp_path, [], {"settings": {"methods": []}})
    with pytest.raises(InputError, match=r"holds a damaged run\.json or records\.jsonl: 'provenance' is missing"):
        reading.load(tmp_path)
    twice = json.dumps(vars(record("beam")) | {"turns": [turn([2])]})
    empty = json.dumps(vars(record("beam")) | {"turns": []})
    wrong = json.dumps(vars(record("beam")) | {"turns": [turn([2], seconds="fast")]})
    write(tmp_path, [wrong, ""], {"settings": {"methods": []}, "provenance": {}})
    with pytest.raises(InputError, match="holds a damaged"):
        reading.load(tmp_path)
    for lines in ([twice, twice, ""], [empty, ""]):
        write(tmp_path, lines, {"settings": {"methods": []}, "provenance": {}})
        with pytest.raises(InputError, match="beam on t 1 is there twice, or empty"):
            reading.load(tmp_path)
    write(tmp_path, [], {"format": 2, "settings": {"methods": []}, "provenance": {}})
    with pytest.raises(InputError, match="has format 2; this windfall reads format 1"):
        reading.load(tmp_path)
    write(tmp_path, [], [])
    with pytest.raises(InputError, match="holds a damaged"):
        reading.load(tmp_path)
