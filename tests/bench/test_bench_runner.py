"""The benchmark's runner, on a tiny random model with a tokenizer of single characters."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.cli import character_tokenizer, windfall
from helpers.tiny import tiny
from windfall.bench import provenance, reading, recording, results, runner
from windfall.bench.methods import DrafterSpec, parse_methods
from windfall.bench.reading import Run
from windfall.bench.runner import Settings
from windfall.bench.store import Store
from windfall.bench.suites import SUITES
from windfall.bench.tasks import Prompt
from windfall.cli.bench import BenchOptions
from windfall.cli.options import ModelOptions
from windfall.core.types import GpuOptions, InputError, SamplingParams
from windfall.costs.curves import Costs
from windfall.engine.dispatch import Dispatcher
from windfall.engine.engine import Engine
from windfall.model.target import Target

PROMPTS = [
    Prompt("talk", "chat", "one", ("tell me a story", "and then what")),
    Prompt("talk", "code", "two", ("a b a b a b a b",)),
    Prompt("text", "", "three", ("once upon a time there was a queue of queues",), raw=True),
]
METHODS = "chain:depth=3,auto,self/beam:depth=3:k=3:nodes=8"
COSTS = Costs.simple(0.001, (1, 2, 8), (1.0, 1.1, 1.5), 0.1)
PROFILES = json.loads(json.dumps({"ngram": {"costs": COSTS.as_dict()}}))
TIMES = ("seconds", "ttft", "prefill", "split")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny(num_hidden_layers=2), character_tokenizer(), "tiny")


def bench(
    target: Target,
    folder: Path,
    methods: str = METHODS,
    prompts: Sequence[Prompt] = PROMPTS,
    resume: bool = False,
    profiles: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    contenders = parse_methods([methods])
    chosen = {"temperatures": (0.0, 1.0), "repeats": 1, "max_new_tokens": 6, "ignore_eos": True, "warm_up": 1}
    asked = Settings(tuple(each.label for each in contenders), ("mine",), **{**chosen, **settings})
    known = PROFILES if profiles is None else profiles
    return runner.run(asked, contenders, prompts, target, Store(folder, resume), DrafterSpec("ngram"), known)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def untimed(folder: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The records by what they are of, without their times."""
    found = {}
    for row in lines(folder):
        for turn in row["turns"]:
            turn.update(dict.fromkeys(TIMES))
        found[row["method"], row["task"], row["id"], row["temperature"], row["repeat"]] = row
    return found


def first_round(folder: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {key: row for key, row in untimed(folder).items() if row["repeat"] == 0}


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    bench(target, folder, repeats=2)
    return folder


# ---- records


def test_every_conversation_is_recorded_once_and_texts_are_the_same(whole: Path) -> None:
    made = reading.load(whole)
    assert len(made.records) == len({(r.method, r.key) for r in made.records}) == 4 * 3 * 2 * 2
    assert not results.differences(made)
    assert made.methods == ["none", "chain:depth=3", "auto", "self/beam:depth=3:k=3:nodes=8"]
    plain = made.select("none")
    assert {record.drafter for record in plain} == {"none"} and results.tau(plain) == 1
    assert results.tau(made.select("self/beam:depth=3:k=3:nodes=8")) > 1.2
    rows = results.summary(made)
    assert {row.task for row in rows} == {"talk", "text", "all"}
    assert all(row.speedup is not None and row.tpot is not None for row in rows)


def test_records_have_all_their_fields(whole: Path) -> None:
    row = next(row for row in lines(whole) if row["method"].startswith("self") and row["id"] == "one")
    about = {"method", "drafter", "policy", "settings", "task", "category", "id", "temperature", "repeat", "seed"}
    assert set(row) >= {*about, "coupled", "turns", "repeated", "peak_memory"}
    assert (row["drafter"], row["policy"], row["category"]) == ("self", "beam", "chat")
    assert row["settings"] == {"depth": 3, "k": 3, "nodes": 8}
    said = {"prompt_tokens", "tokens", "digest", "finish", *TIMES}
    assert set(row["turns"][0]) >= {*said, "committed", "accepted", "rows", "drafted", "passes", "depth", "nodes"}
    assert set(row["turns"][0]["split"]) == {"draft", "verify", "policy", "other", "prompts"}


def test_the_lists_of_a_record_agree(whole: Path) -> None:
    for row in lines(whole):
        for turn in row["turns"]:
            cycles = len(turn["committed"])
            assert all(len(turn[name]) == cycles for name in ("accepted", "rows", "drafted", "passes", "depth"))
            assert sum(turn["committed"]) == turn["tokens"] == 6
            verified, judged, accepted = (sum(node[place] for node in turn["nodes"]) for place in (3, 4, 5))
            assert verified == sum(turn["rows"]) - cycles
            assert accepted == sum(turn["accepted"]) <= judged <= verified
            assert all(a <= d for a, d in zip(turn["accepted"], turn["depth"], strict=True))
            for depth, tried in enumerate(turn["tried"], 1):
                assert sum(node[5] for node in turn["nodes"] if node[0] == depth) <= tried
                assert tried == sum(node[4] for node in turn["nodes"] if node[:2] == [depth, 0])


def test_repetition_and_digests() -> None:
    assert recording.repeated_share([[1, 2, 3]]) == 0
    assert recording.repeated_share([[5] * 10]) == 2 / 3  # three 8-grams, the second and third seen before
    assert recording.repeated_share([list(range(10)), list(range(10))]) == 0  # each answer for itself
    assert recording.digest([1, 23]) != recording.digest([12, 3])


def test_a_second_turn_answers_the_first_reply(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, run = [], Engine.run
    monkeypatch.setattr(
        Engine, "run", lambda self, prompts, params: asked.append(prompts[0]) or run(self, prompts, params)
    )
    taken, take = [], runner.Conversation.take
    keep = lambda self, made, timed: taken.append(made) or take(self, made, timed)  # noqa: E731
    monkeypatch.setattr(runner.Conversation, "take", keep)
    bench(target, tmp_path / "run", "none", PROMPTS[:1], temperatures=(0.0,), warm_up=0)
    messages = [
        {"role": "user", "content": "tell me a story"},
        {"role": "assistant", "content": taken[0].text},
        {"role": "user", "content": "and then what"},
    ]
    encode = target.tokenizer.apply_chat_template
    assert asked == [encode(m, add_generation_prompt=True, return_dict=False) for m in (messages[:1], messages)]
    row = lines(tmp_path / "run")[0]
    assert [turn["prompt_tokens"] for turn in row["turns"]] == [len(ids) for ids in asked]


def test_without_a_chat_template_turns_are_paragraphs(tmp_path: Path) -> None:
    bare = Engine(Target(tiny(), character_tokenizer(None)), runner.NoDrafter(), runner.NoSpeculation())
    ids = runner.question(PROMPTS[0], ["once"], bare, 10)
    assert bare.target.tokenizer.decode(ids) == "tell me a story\n\nonce\n\nand then what"


def test_texts_are_cut_to_their_first_tokens(target: Target, tmp_path: Path) -> None:
    bench(target, tmp_path / "run", "none", PROMPTS[2:], prompt_tokens=12, temperatures=(0.0,))
    assert lines(tmp_path / "run")[0]["turns"][0]["prompt_tokens"] == 12


def test_prompts_without_room_are_left_out(target: Target) -> None:
    settings = Settings(("none",), ("mine",), max_new_tokens=200)
    long = Prompt("talk", "", "long", ("a" * 100,))
    assert runner.fitting([*PROMPTS, long], target, settings) == PROMPTS


def test_a_conversation_ends_where_its_next_answer_has_no_room(target: Target, tmp_path: Path) -> None:
    prompt = Prompt("talk", "", "long", ("a" * 30, "b" * 220, "c"))
    made = bench(target, tmp_path / "run", "chain", [prompt], temperatures=(0.0,))
    assert [len(record.turns) for record in made.records] == [1, 1]


# ---- order and state


def test_methods_take_turns_and_another_one_begins_each_time(target: Target, tmp_path: Path) -> None:
    bench(target, tmp_path / "run", "chain,beam", temperatures=(0.0, 1.0), repeats=2)
    order = [(r["repeat"], r["id"], r["temperature"], r["method"]) for r in lines(tmp_path / "run")]
    groups = [order[start : start + 3] for start in range(0, len(order), 3)]
    places = [(repeat, p.id, heat) for repeat in (0, 1) for p in PROMPTS for heat in (0.0, 1.0)]
    assert [group[0][:3] for group in groups] == places
    assert all(len({each[:3] for each in group}) == 1 and len({each[3] for each in group}) == 3 for group in groups)
    for heat in (0.0, 1.0):
        first = [group[0][3] for group in groups if group[0][2] == heat]
        assert {first.count(method) for method in ("none", "chain", "beam")} == {2}


def test_the_same_run_gives_the_same_records(target: Target, whole: Path, tmp_path: Path) -> None:
    again = bench(target, tmp_path / "again")
    assert untimed(tmp_path / "again") == first_round(whole)
    made = reading.load(whole)
    before = replace(made, records=[record for record in made.records if record.repeat == 0])
    for ours, theirs in zip(results.summary(again), results.summary(before), strict=True):
        assert (ours.tau, ours.delta, ours.rows) == (theirs.tau, theirs.delta, theirs.rows)


def test_seeds_and_repeats_give_other_texts_when_sampling_alone(target: Target, whole: Path, tmp_path: Path) -> None:
    bench(target, tmp_path / "other", "none", repeats=2, seed=1)

    def texts(folder: Path, heat: float) -> list[str]:
        rows = [r for r in lines(folder) if (r["method"], r["id"], r["temperature"]) == ("none", "two", heat)]
        return [row["turns"][0]["digest"] for row in rows]

    assert len({*texts(whole, 1.0), *texts(tmp_path / "other", 1.0)}) == 4
    assert len({*texts(whole, 0.0), *texts(tmp_path / "other", 0.0)}) == 1


def test_methods_do_not_influence_each_other(target: Target, tmp_path: Path) -> None:
    """Not even those that learn from one text for the next."""
    learners = ["auto", "gammatune:carry=true", "dynatree:history=release", "self/auto"]
    costs = {**PROFILES, "self": PROFILES["ngram"]}
    bench(target, tmp_path / "all", ",".join(learners), profiles=costs)
    together = untimed(tmp_path / "all")
    for place, method in enumerate(learners):
        bench(target, tmp_path / f"{place}", method, PROMPTS[1:], profiles=costs)
        alone = untimed(tmp_path / f"{place}")
        assert alone == {key: row for key, row in together.items() if key in alone}


def test_methods_learn_from_the_warm_up_which_is_not_recorded(target: Target, tmp_path: Path) -> None:
    method = "self/auto"
    costs = {"self": PROFILES["ngram"]}
    bench(target, tmp_path / "cold", method, profiles=costs, warm_up=0)
    bench(target, tmp_path / "warm", method, profiles=costs, warm_up=3)
    cold, warm = (untimed(tmp_path / name) for name in ("cold", "warm"))
    assert set(cold) == set(warm) and cold != warm
    learnt = json.loads((tmp_path / "warm" / "warm-up.json").read_text())
    assert learnt["self/auto 1"]["coupled"]["observed"] > 0


# ---- batches


@pytest.mark.parametrize("coupled", [False, True])
def test_batches_commit_what_single_conversations_do(target: Target, tmp_path: Path, coupled: bool) -> None:
    heats = (0.0,) if coupled else (0.0, 1.0)  # kappa is learnt by a batch together
    how = {"methods": "chain,self/beam:depth=2:k=3", "temperatures": heats, "coupled": coupled}
    bench(target, tmp_path / "single", **how, timing=False)
    bench(target, tmp_path / "batch", **how, timing=False, batch=2)
    single, batch = untimed(tmp_path / "single"), untimed(tmp_path / "batch")
    assert set(single) == set(batch)
    for key, row in single.items():
        for ours, theirs in zip(row["turns"], batch[key]["turns"], strict=True):
            assert (ours["digest"], ours["committed"], ours["nodes"]) == (
                theirs["digest"],
                theirs["committed"],
                theirs["nodes"],
            )
    assert all(turn["seconds"] is None for row in lines(tmp_path / "batch") for turn in row["turns"])


def test_half_a_batch_is_done_again_as_a_whole(target: Target, tmp_path: Path) -> None:
    how = {"methods": "auto", "timing": False, "batch": 2}
    bench(target, tmp_path / "whole", **how)
    bench(target, tmp_path / "cut", **how)
    file = tmp_path / "cut" / "records.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))
    bench(target, tmp_path / "cut", **how, resume=True)
    assert untimed(tmp_path / "cut") == untimed(tmp_path / "whole")
    assert len(lines(tmp_path / "cut")) == len(lines(tmp_path / "whole"))


# ---- interruption


@pytest.mark.parametrize("after", [0, 13])
def test_an_interrupted_run_goes_on(
    target: Target, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    folder, append = tmp_path / "cut", Store.append

    def interrupted(self: Store, row: dict[str, Any]) -> None:
        if len(self.done) == after:
            raise KeyboardInterrupt
        append(self, row)

    monkeypatch.setattr(Store, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(target, folder)
    monkeypatch.setattr(Store, "append", append)
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"method": "chain", "tas')  # a line that was being written when the machine went down
    bench(target, folder, resume=True, profiles={})  # the costs are those of the first part
    assert untimed(folder) == first_round(whole)
    assert [r["method"] for r in lines(folder)] == [r["method"] for r in lines(whole) if r["repeat"] == 0]
    about = json.loads((folder / "run.json").read_text())
    assert len(about["provenance"]["resumed"]) == 1 and about["profiles"] == PROFILES


def test_a_finished_run_is_left_alone(target: Target, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (whole / "records.jsonl").read_bytes()
    monkeypatch.setattr(runner, "answer", None)  # nothing may be decoded
    bench(target, whole, repeats=2, resume=True)
    assert (whole / "records.jsonl").read_bytes() == before


def test_a_folder_that_is_not_there_is_not_resumed(target: Target, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no folder '.*typo' to resume"):
        bench(target, tmp_path / "typo", resume=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 17}, "max_new_tokens was 6, not 17"),
        ({"temperatures": (0.0,)}, r"temperatures was \[0.0, 1.0\], not \[0.0\]"),
        ({"methods": "chain"}, "methods was"),
        ({"prompts": PROMPTS[:2]}, "prompts was"),
        ({"coupled": False}, "coupled was true, not false"),
    ],
)
def test_another_run_is_not_resumed(target: Target, whole: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"was run with other settings: {message}") as raised:
        bench(target, whole, resume=True, **{"repeats": 2, **change})
    assert "\n" not in str(raised.value)


def test_another_machine_is_not_resumed(target: Target, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "machine", lambda device: {"cpu": "another"})
    with pytest.raises(InputError, match="other settings: machine was"):
        bench(target, whole, repeats=2, resume=True)


def test_two_runs_do_not_share_a_folder(whole: Path) -> None:
    store = Store(whole, resume=True)
    with pytest.raises(InputError, match="is in use by a run that has not ended"):
        Store(whole, resume=True)
    store.close()
    Store(whole, resume=True).close()


def test_other_weights_are_not_resumed(whole: Path) -> None:
    other = Target(tiny(seed=1), character_tokenizer(), "tiny")
    with pytest.raises(InputError, match="other settings: target was"):
        bench(other, whole, repeats=2, resume=True)


def test_folders_with_something_else_are_refused(target: Target, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not empty; give another --out, or --resume"):
        Store(whole)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds no run\.json"):
        Store(tmp_path, resume=True)
    with pytest.raises(InputError, match="cannot use"):
        Store(tmp_path / "notes.txt")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(InputError, match="holds a damaged"):
        Store(tmp_path, resume=True)


# ---- costs and provenance


def test_costs_come_from_a_file(target: Target, whole: Path, tmp_path: Path) -> None:
    assert runner.read_profiles(whole / "run.json") == PROFILES
    single = tmp_path / "profile.json"
    single.write_text(json.dumps({**PROFILES["ngram"], "about": {"target": {"name": "/home/me/models/small"}}}))
    bench(target, tmp_path / "given", "auto", PROMPTS[1:2], profiles=runner.read_profiles(single))
    assert "/home/me" not in (tmp_path / "given" / "run.json").read_text()
    single.write_text('{"costs": {}}')
    with pytest.raises(InputError, match="is no profile"):
        runner.read_profiles(single)
    with pytest.raises(InputError, match="no costs for the drafter self; it has: ngram"):
        bench(target, tmp_path / "run", "self/auto")


def test_gpu_buffers_have_room_for_the_longest_conversation(target: Target, tmp_path: Path) -> None:
    """Buffers do not grow in the middle of a run, and the texts are those of the ordinary path."""
    few, asked = "chain:depth=3,self/beam:depth=3:k=3:nodes=8", PROMPTS[:2]
    bench(target, tmp_path / "plain", few, asked)
    bench(target, tmp_path / "graphs", few, asked, graphs=True)
    texts = [
        {key: [turn["digest"] for turn in row["turns"]] for key, row in untimed(tmp_path / name).items()}
        for name in ("plain", "graphs")
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 3 * 2 * 2
    settings = Settings(("none",), ("mine",), max_new_tokens=3000, graphs=True)
    (plain,) = runner.assemble(
        parse_methods(["none"]), target, DrafterSpec("ngram"), True, gpu_options=GpuOptions(True)
    )
    before = plain.engine.gpu_runner.gpu_target.capacity if plain.engine.gpu_runner else 0
    roomy = Target(tiny(max_position_embeddings=16384), target.tokenizer, "long")
    runner.make_room([plain.engine], roomy, PROMPTS, settings)
    assert plain.engine.gpu_runner is not None and plain.engine.gpu_runner.gpu_target.capacity > max(before, 6000)


def test_prefills_of_every_length_are_captured_before_timing(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where passes are recorded; each method at first, and no method otherwise."""
    read: list[int] = []

    def spied(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> Any:
        read.extend(len(ids) for ids, own in zip(prompts, params, strict=True) if own.max_new_tokens == 1)
        return plain(engine, prompts, params)

    plain = runner.answer
    monkeypatch.setattr(runner, "answer", spied)
    bench(target, tmp_path / "plain", "chain:depth=3", PROMPTS)
    assert not read
    bench(target, tmp_path / "graphs", "chain:depth=3", PROMPTS, graphs=True)
    wanted = {runner.prompt_length(prompt, target, Settings.prompt_tokens) // runner.PREFILL_STEP for prompt in PROMPTS}
    assert len(read) == 2 * len(wanted) and {length // runner.PREFILL_STEP for length in read} == wanted


def test_memory_is_measured_with_each_method_alone(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pretended(Target):
        device = property(lambda self: torch.device("cuda"))

    pretended = copy.copy(target)
    pretended.__class__ = Pretended
    engines: list[str] = []
    for name in ("reset_peak_memory_stats", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr("windfall.bench.memory.held_by_graphs", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 + len(engines))
    decode = Engine.decode

    def watched(self: Engine, *given: Any) -> Any:
        engines.append(type(self.drafter).__name__)
        return decode(self, *given)

    monkeypatch.setattr(Engine, "decode", watched)
    methods = parse_methods(["chain:depth=3,self/beam:depth=3:k=3:nodes=8"])
    contenders = runner.assemble(methods, target, DrafterSpec("ngram"), True)
    part = runner.Part("some", ("chain:depth=3",), ("talk",), (0.0,), memory=True)
    settings = Settings(tuple(m.label for m in methods), ("mine",), max_new_tokens=4, parts=(part,))
    peaks = dict(
        runner.measure_memory(contenders, PROMPTS, pretended, DrafterSpec("ngram"), settings, False, GpuOptions())
    )
    weights = sum(weight.nbytes for weight in target.model.parameters())
    assert peaks == {"none": weights + 3, "chain:depth=3": weights + 6}  # a warm-up and two answers each
    assert engines == ["NoDrafter"] * 3 + ["NGramDrafter"] * 3
    assert not list(
        runner.measure_memory(contenders, PROMPTS, target, DrafterSpec("ngram"), settings, False, GpuOptions())
    )


def test_drafters_of_the_same_name_are_not_mixed_up(target: Target) -> None:
    methods = parse_methods(["chain,/one/ngram/chain"])
    with pytest.raises(InputError, match="two different drafters would be called 'ngram'"):
        runner.assemble(methods, target, DrafterSpec("ngram"), coupled=True)


def test_the_provenance_has_no_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shorten = provenance.shorten
    assert shorten("/home/me/models/small") == "small"
    assert shorten(f"{tmp_path}/out/one") == "out/one"
    assert shorten("--tasks=/data/a.jsonl,/data/b.jsonl") == "--tasks=a.jsonl,b.jsonl"
    assert shorten("self:skip=3+5/beam,ngram/chain") == "self:skip=3+5/beam,ngram/chain"
    assert shorten("--methods=+/home/me/gs.json,/data/b.json") == "--methods=+gs.json,b.json"
    assert shorten("/my models/small/chain:depth=3") == "chain:depth=3"
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path / "small")
    assert shorten(f"{tmp_path}/small/chain:depth=3") == "chain:depth=3"  # of the folder where one is
    monkeypatch.chdir(Path(__file__).parent)
    assert shorten(f"{tmp_path}/small/chain:depth=3") == "small/chain:depth=3"  # a drafter that is there
    drafter = DrafterSpec("lm", {"model": "/home/me/models/small"})
    assert drafter.label == "lm:model=small" and drafter.public_settings == {"model": "small"}


def test_weights_are_known_by_their_hash() -> None:
    one, same, other = (provenance.weights_hash(tiny(seed=s).named_parameters()) for s in (0, 0, 1))
    assert one == same != other
    changed = tiny()
    changed.get_output_embeddings().weight.data[0, 0] += 1
    assert provenance.weights_hash(changed.named_parameters()) != one


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 4}, "cannot be timed apart; add --no-timing"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"temperatures": (0.0, 0.0)}, "give each temperature once"),
        ({"temperatures": (-1.0,)}, "temperature must be 0"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"repeats": 2, "timing": False}, "greedy answers repeat themselves"),
        ({"warm_up": 7}, "there are 6 prompts to warm up with, not 7"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(("none",), ("builtin",), **settings)


def test_suites_name_what_there_is() -> None:
    from windfall.bench.tasks import BUILTIN, HUB

    for suite in SUITES.values():
        assert len(parse_methods(suite.methods)) == len(suite.methods) + 1
        assert set(suite.tasks) <= {BUILTIN, *HUB}
        Settings(suite.methods, suite.tasks, suite.temperatures, suite.repeats, suite.limit, suite.max_new_tokens)


# ---- the command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny(num_hidden_layers=2).save_pretrained(place)
    character_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tasks") / "short.jsonl"
    rows = [{"id": p.id, "category": p.category, "turns": p.turns} for p in PROMPTS]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


SHORT = ("--max-new-tokens", 8, "--repeats", 1, "--warm-up", 1)


def test_run_and_show(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--target", model, "--tasks", prompts, "--out", out, "--temperature", "0,1", *SHORT)
    done = windfall("bench", "run", "--methods", "chain,beam:k=2", "--methods", "self/chain", *options)
    assert done.exit_code == 0, done.output
    assert "Same text as plain decoding in all 18 conversations" in done.stdout
    assert windfall("bench", "show", out).stdout == done.stdout
    told = json.loads(windfall("bench", "show", out, "--json").stdout)
    assert {row["method"] for row in told["rows"]} == {"none", "chain", "beam:k=2", "self/chain"}
    assert told["different"] == []
    about = (out / "run.json").read_text()
    assert str(tmp_path) not in about and str(model.parent) not in about and str(prompts.parent) not in about
    again = windfall("bench", "run", "--methods", "chain", *options)
    assert again.exit_code == 2 and "is not empty" in again.stderr


def test_a_suite_with_own_tasks(model: Path, prompts: Path, tmp_path: Path) -> None:
    done = windfall("bench", "run", "--suite", "smoke", "--target", model, "--tasks", prompts, "--out", tmp_path / "o")
    assert done.exit_code == 0, done.output
    settings = json.loads((tmp_path / "o" / "run.json").read_text())["settings"]
    assert settings["suite"] == "smoke" and settings["max_new_tokens"] == 16 and settings["tasks"] == ["short.jsonl"]


def test_several_suites_at_once(model: Path, tmp_path: Path) -> None:
    """Each suite has its own methods, tasks and temperatures; what they share is run once."""
    for name in ("mt_bench", "gsm8k", "other"):
        rows = [{"id": f"{name}{n}", "turns": [f"{name} {n}"]} for n in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ",".join(str(tmp_path / f"{name}.jsonl") for name in ("mt_bench", "gsm8k", "other"))
    where = ("--target", model, "--tasks", files, "--limit", 1, "--out", tmp_path / "out", "--drafter", "self")
    short = ("--max-new-tokens", 4, "--repeats", 1, "--warm-up", 0)
    done = windfall("bench", "run", "--suite", "talon-t3,gt-t4,ltd-t9", *where, *short)
    assert done.exit_code == 0, done.output
    made = reading.load(tmp_path / "out")
    held = {(r.method, r.task, r.temperature) for r in made.records}
    assert held == {
        *((m, task, 1.0) for m in ("none", *SUITES["talon-t3"].methods) for task in ("mt_bench", "gsm8k")),
        *((m, "mt_bench", 0.0) for m in ("none", *SUITES["gt-t4"].methods, "ltd")),
        *((m, "gsm8k", 0.0) for m in ("none", "ltd")),
    }
    assert not results.differences(made) and made.settings["suite"] == "talon-t3,gt-t4,ltd-t9"
    again = windfall("bench", "run", "--suite", "talon-t3,gt-t4,ltd-t9", *where, *short, "--resume")
    assert again.exit_code == 0 and len(reading.load(tmp_path / "out").records) == len(made.records)
    refused = windfall("bench", "run", "--suite", "gt-t4,dynatree-t1", *where)
    assert refused.exit_code == 2 and "differ in ignore_eos" in refused.stderr


def test_given_methods_replace_those_of_suites(model: Path, prompts: Path, tmp_path: Path) -> None:
    where = ("--target", model, "--tasks", prompts, "--out", tmp_path / "out", "--methods", "chain:depth=2", *SHORT)
    assert windfall("bench", "run", "--suite", "salf-t2,talon-t3", *where).exit_code == 0
    made = reading.load(tmp_path / "out")
    assert made.methods == ["none", "chain:depth=2"] and made.temperatures == [0.0, 1.0]
    assert {part["suite"] for part in made.settings["parts"]} == {"salf-t2", "talon-t3"}


def test_methods_are_added_to_suites(model: Path, prompts: Path, tmp_path: Path) -> None:
    where = ("--target", model, "--tasks", prompts, "--out", tmp_path / "out", "--drafter", "self", "--limit", 1)
    done = windfall("bench", "run", "--suite", "salf-t3,ltd-t9", "--methods", "+chain:depth=2,+none", *where, *SHORT)
    assert done.exit_code == 0, done.output
    made = reading.load(tmp_path / "out")
    assert made.methods == ["none", "optimal", "ltd", "chain:depth=2"]
    assert [part["methods"] for part in made.settings["parts"]] == [
        ["none", "optimal", "chain:depth=2"],
        ["none", "ltd", "chain:depth=2"],
    ]


def test_every_policy_is_added_to_suites() -> None:
    bench = BenchOptions(suite="salf-t3,ltd-t9", methods=["+all"])
    labels = [method.label for method in parse_methods(bench.method_names)]
    parts = bench.parts(bench.settings(labels, ModelOptions()), PROMPTS)
    assert [set(part.methods) for part in parts] == [set(labels)] * 2 and "talon" in labels


def test_memory_is_not_measured_without_a_gpu(model: Path, prompts: Path, tmp_path: Path) -> None:
    options = ("--target", model, "--tasks", prompts, "--methods", "chain", "--limit", 1, *SHORT)
    done = windfall("bench", "run", "--out", tmp_path / "o", *options, "--memory")
    assert done.exit_code == 0 and "peak memory is measured on CUDA devices only, not on cpu" in done.stderr
    assert not (tmp_path / "o" / reading.PEAKS_FILE).exists()


def test_another_text_is_a_failure(model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = runner.turn_record

    def wrong(made: Any, *more: Any) -> dict[str, Any]:
        found = record(made, *more)
        return {**found, "digest": "x"} if sum(found["passes"]) else found

    monkeypatch.setattr(runner, "turn_record", wrong)
    options = ("--target", model, "--tasks", prompts, *SHORT, "--methods", "chain")
    done = windfall("bench", "run", "--out", tmp_path / "one", *options)
    assert done.exit_code == 1
    assert re.search(r"3 of 3 conversations differ from plain decoding", done.stdout)
    assert "chain on short one: temperature 0, repeat 0, turn 1" in done.stdout
    rough = windfall("bench", "run", "--out", tmp_path / "two", *options, "--dtype", "bfloat16")
    assert rough.exit_code == 0 and "differ from plain decoding" in rough.stdout
    monkeypatch.setattr(Dispatcher, "wants_graphs", property(lambda self: True))  # as on a GPU
    exact = windfall("bench", "run", "--out", tmp_path / "three", *options, "--dtype", "bfloat16")
    fast = windfall("bench", "run", "--out", tmp_path / "four", *options, "--dtype", "bfloat16", "--fast")
    assert (exact.exit_code, fast.exit_code) == (1, 0)
    targets = [reading.load(tmp_path / name).provenance["target"] for name in ("one", "two", "three", "four")]
    assert [target["exact"] for target in targets] == [False, False, True, False]


def test_ctrl_c_says_what_is_kept(model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Store.append

    def stop(self: Store, row: dict[str, Any]) -> None:
        append(self, row)
        if len(self.done) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "append", stop)
    done = windfall("bench", "run", "--target", model, "--tasks", prompts, "--out", tmp_path / "o", *SHORT)
    assert done.exit_code == 130
    assert "2 conversations kept" in done.stderr and len(lines(tmp_path / "o")) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "smok"], "there is no suite 'smok'; choose from smoke, salf-t1"),
        (["--methods", "bream"], "there is no policy 'bream'"),
        (["--tasks", "none.jsonl"], "cannot read 'none.jsonl'"),
        (["--tasks", "a,,b"], "write --tasks as names separated by commas"),
        (["--temperature", "0;1"], "write --temperature as numbers separated by commas"),
        (["--batch", "8"], "add --no-timing"),
        (["--profile", "none.json"], "cannot read 'none.json'"),
        (["--max-new-tokens", "5000"], "no prompt fits: tiny has a context of 256"),
    ],
)
def test_wrong_input_is_one_line(model: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    done = windfall("bench", "run", "--target", model, "--out", tmp_path / "o", *arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert re.fullmatch(r"windfall: [^\n]+\n", done.stderr), done.stderr
    assert message in done.stderr


def test_one_round_is_enough_without_times(model: Path, prompts: Path, tmp_path: Path) -> None:
    options = ("--target", model, "--tasks", prompts, "--methods", "chain", "--max-new-tokens", 4, "--no-timing")
    done = windfall("bench", "run", "--out", tmp_path / "o", *options)
    assert done.exit_code == 0 and "one round over the prompts" in done.stderr
    assert json.loads((tmp_path / "o" / "run.json").read_text())["settings"]["repeats"] == 1
    refused = windfall("bench", "run", "--out", tmp_path / "p", *options, "--repeats", 2)
    assert refused.exit_code == 2 and "greedy answers repeat themselves" in refused.stderr


def test_suites_are_listed() -> None:
    shown = windfall("bench", "suites").stdout
    assert all(name in shown for name in SUITES)
    assert set(json.loads(windfall("bench", "suites", "--json").stdout)) == set(SUITES)
