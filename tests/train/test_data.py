"""Answers in bulk are the engine's answers; what is written down is what was said, however often it was interrupted."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.cli import character_tokenizer, refused, windfall
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.sampling import gumbel, mix, signed
from windfall.core.types import InputError
from windfall.engine.engine import Engine
from windfall.model.target import Target
from windfall.train import shards, slots
from windfall.train.bulk import BulkGenerator, Job, State, draw, token_marks
from windfall.train.data import Progress, Settings, find_loop, make_data, user_opening
from windfall.train.shards import TokenData, token_counts
from windfall.train.sources import PASSAGE, Source, read_sources

PROMPTS = [prompt(length, seed=length) for length in (1, 2, 9, 33, 40, 17, 5)]
END = 4  # <|end|>
SETTINGS = Settings(max_new_tokens=12, held_out=0.3, shard=5, max_length=120)


# ---- the mill


def jobs(temperature: float = 0.0, limit: int = 20) -> deque[Job]:
    return deque(Job(i, tokens, limit + i, temperature, i) for i, tokens in enumerate(PROMPTS))


def engine_texts(target: Target, temperature: float) -> dict[int, list[int]]:
    engine = Engine(target, registry.drafter("ngram"), registry.policy("none"))
    return {
        job.key: engine.generate(job.prompt, max_new_tokens=job.limit, temperature=temperature, seed=job.seed).token_ids
        for job in jobs()
    }


def written(mill: BulkGenerator, queue: deque[Job]) -> dict[int, list[int]]:
    return {answer.job.key: answer.tokens for answer in mill.run(queue)}


def reference(query: Tensor, key: Tensor, value: Tensor, bounds: slots.Bounds, scale: float | None) -> Tensor:
    """What the flash kernel computes, sequence by sequence."""
    mixed, group = torch.empty_like(query), query.shape[1] // key.shape[1]
    for i in range(len(bounds.queries) - 1):
        rows, start = slice(bounds.queries[i], bounds.queries[i + 1]), int(bounds.keys[i])
        size = int(bounds.keys[i + 1]) - start if bounds.used is None else int(bounds.used[i])
        own = (x[start : start + size].repeat_interleave(group, 1).transpose(0, 1)[None] for x in (key, value))
        states = torch.nn.functional.scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None], *own, is_causal=bounds.causal, scale=scale
        )
        mixed[rows] = states[0].transpose(0, 1)
    return mixed


@pytest.mark.parametrize(
    ("family", "temperature"),
    [("llama", 0.0), ("llama", 1.0), ("qwen3", 1.0), ("gpt2", 0.0), ("phi", 1.0), ("mixtral", 0.0)],
)
def test_a_mill_writes_what_the_engine_writes(family: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "flash", reference)
    target = Target(tiny(family))
    wanted = engine_texts(target, temperature)
    for packed in (False, True):  # padding and masks; back to back with lengths
        mill = BulkGenerator(target, batch=3, capacity=100)
        mill.packed = packed
        assert written(mill, jobs(temperature)) == wanted
        assert target.model.config._attn_implementation == "sdpa"


def test_next_to_no_temperature_is_greedy() -> None:
    logits, places = torch.randn(2, 7, generator=torch.Generator().manual_seed(0)), torch.arange(2)
    found = draw(logits, places, places, torch.tensor([1e-44, 0.0]), token_marks(7, torch.device("cpu")))
    assert torch.equal(found, logits.argmax(-1))


@pytest.mark.parametrize("batch", [1, 7, 16])
def test_an_answer_does_not_depend_on_the_others(batch: int) -> None:
    target = Target(tiny())
    assert written(BulkGenerator(target, batch, capacity=100), jobs(1.0)) == engine_texts(target, 1.0)


def test_reading_late_changes_nothing() -> None:
    """As on a GPU: several steps between two looks, the next ones begun before the look."""
    target = Target(tiny(eos_token_id=7))
    wanted = engine_texts(target, 1.0)
    mill = BulkGenerator(target, batch=3, capacity=100)
    mill.steps, mill.lag, mill.patience = 8, 1, 2
    mill.state = State(3, mill.steps, target.device)
    assert written(mill, jobs(1.0)) == wanted
    assert any(text[-1] == 7 for text in wanted.values())


def test_texts_end_at_their_ends() -> None:
    target = Target(tiny())
    mill = BulkGenerator(target, batch=2, capacity=48)
    free = {a.job.key: a for a in mill.run(jobs(limit=100))}
    assert all(len(a.job.prompt) + len(a.tokens) == 48 and a.finish == "length" for a in free.values())
    stop = free[2].tokens[3]
    ended = {a.job.key: a for a in mill.run(jobs(limit=100), eos=(stop,))}
    for key, answer in ended.items():
        tokens = free[key].tokens
        cut = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert answer.tokens == tokens[:cut] and answer.finish == ("stop" if stop in tokens else "length")
    assert ended[2].finish == "stop"


def test_jobs_are_taken_in_order_and_may_come_late() -> None:
    mill = BulkGenerator(Target(tiny()), batch=1, capacity=64)
    queue = deque([Job("first", PROMPTS[2], 3), Job("second", PROMPTS[1], 3)])
    order = []
    for answer in mill.run(queue):
        order.append(answer.job.key)
        if answer.job.key == "first":
            queue.appendleft(Job("between", PROMPTS[4], 3))
    assert order == ["first", "between", "second"]


def test_a_run_that_was_given_up_leaves_nothing_behind() -> None:
    target = Target(tiny())
    mill = BulkGenerator(target, batch=3, capacity=100)
    next(mill.run(jobs(1.0)))
    assert written(mill, jobs()) == engine_texts(target, 0.0)


def test_what_a_mill_refuses() -> None:
    with pytest.raises(InputError, match="sliding windows"):
        BulkGenerator(Target(tiny("mistral-window")), 2)
    with pytest.raises(InputError, match="1 to 31 tokens, not 33"):
        list(BulkGenerator(Target(tiny()), 2, capacity=32).run(jobs()))


def test_draws_have_the_noise_of_the_sampler() -> None:
    logits, positions = torch.randn(5, 61), torch.tensor([3, 0, 9, 9, 200])
    seeds, temperatures = [1, 2, 3, -4, 2**62], torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0])
    hashed = mix(torch.tensor([signed(seed) for seed in seeds]))
    drawn = draw(logits, hashed, positions, temperatures, token_marks(61, logits.device))
    for row, (seed, temperature) in enumerate(zip(seeds, temperatures.tolist(), strict=True)):
        noise = gumbel(seed, positions[row : row + 1], torch.arange(61))[0]
        scores = logits[row] / temperature + noise if temperature else logits[row]
        assert drawn[row] == scores.argmax()


# ---- prompts


def read(*files: Path) -> list[Source]:
    return list(read_sources(map(str, files)))


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"id": "a", "turns": ["one", "two"]}, ("one", "two")),
        ({"prompt": "one"}, ("one",)),
        ({"prompt": [{"role": "user", "content": "one"}]}, ("one",)),
        ({"instruction": "one", "input": "two"}, ("one\n\ntwo",)),
        ({"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"}]}, ("one",)),
        (
            {
                "messages": [
                    {"role": "system", "content": "x"},
                    {"role": "user", "content": "one"},
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": [{"type": "text", "text": "two"}]},
                ]
            },
            ("one", "two"),
        ),
    ],
)
def test_dialects_of_prompts(tmp_path: Path, row: dict[str, Any], turns: tuple[str, ...]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(row) + "\n\n" + json.dumps(row))
    assert read(file) == [Source(turns, True, "prompts.jsonl")] * 2
    listed = tmp_path / "prompts.json"
    listed.write_text(json.dumps([row]))
    assert [source.turns for source in read(listed)] == [turns]


def test_plain_text_becomes_passages(tmp_path: Path) -> None:
    paragraphs = [f"{word} " * 60 for word in ("alpha", "beta", "gamma", "delta")]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    passages = read(tmp_path / "book.txt")
    assert all(not source.chat and len(source.turns[0]) <= PASSAGE for source in passages)
    assert " ".join(s.turns[0] for s in passages).split() == " ".join(paragraphs).split()


def test_the_same_prompt_has_the_same_key() -> None:
    assert Source(("Hello  there\n",)).key == Source(("hello There",)).key
    assert Source(("a", "b")).key != Source(("a b",)).key
    assert Source(("a",)).key != Source(("a",), chat=False).key


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "{", "line 1 of '.*a.jsonl' is not JSON"),
        ("a.jsonl", '{"prompt":' + 20_000 * "[" + 20_000 * "]" + "}", "line 1 of '.*a.jsonl' is not JSON"),
        ("a.jsonl", '{"prompt": "\\ud800 hi"}', "line 1 of '.*a.jsonl' is not valid Unicode"),
        ("a.jsonl", '{"instruction": "x", "input": 5}', "line 1 of '.*a.jsonl': a user's message has no text"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "message has no text"),
        ("a.jsonl", '{"prompt": "x"}\n[1]', "line 2 of .* is not a JSON object"),
        ("a.jsonl", '{"answer": "x"}', "needs one of turns, messages"),
        ("a.jsonl", '{"turns": [1]}', "a turn is a text or a message"),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="there is no file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="is a folder"):
        read(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        list(read_sources(["some/dataset:test"]))


# ---- conversations


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny(eos_token_id=END), character_tokenizer(), "tiny")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("prompts")
    words = ["stone", "river", "cloud", "maple", "ember", "frost", "lemon", "tiger"]
    rows: list[dict[str, Any]] = [{"prompt": f"Tell of {a} and {b}"} for a in words[:4] for b in words[4:]]
    rows += [{"turns": [f"What is {a}", "And then", "Why"]} for a in words[:5]]
    rows += [{"prompt": "tell of STONE and  ember"}, {"prompt": "x" * 300}]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "book.txt").write_text("Once there was a river that ran uphill. " * 2)
    return [str(folder / "chat.jsonl"), str(folder / "book.txt")]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def whole(target: Target, files: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, make_data(target, files, folder, SETTINGS, batch=4)


def test_the_mask_marks_exactly_what_the_target_wrote(target: Target, tmp_path: Path) -> None:
    turns = ("What is stone", "And then", "Why")
    (tmp_path / "p.jsonl").write_text(json.dumps({"turns": turns}))
    settings = dataclasses.replace(SETTINGS, held_out=0.0, greedy_share=1.0, max_length=250)
    about = make_data(target, [str(tmp_path / "p.jsonl")], tmp_path / "out", settings)
    engine = Engine(target, registry.drafter("ngram"), registry.policy("none"))
    messages: list[dict[str, str]] = []
    tokens: list[int] = []
    answer: list[bool] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        asked = engine.encode(messages)
        made = engine.generate(messages, max_new_tokens=12).token_ids
        assert asked[: len(tokens)] == tokens
        answer += [False] * (len(asked) - len(tokens)) + [True] * len(made)
        tokens = asked + made
        said = target.tokenizer.decode(made, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": said})
    data = TokenData.open(tmp_path / "out")
    assert len(data) == 1 and data[0][0].dtype == torch.int32
    assert data[0][0].tolist() == tokens and data[0][1].tolist() == answer
    assert about["counts"]["answers"] == 3 and about["finished"]


def test_the_end_of_a_turn_belongs_to_the_answer(whole: tuple[Path, dict[str, Any]]) -> None:
    data, about = TokenData.open(whole[0]), whole[1]
    ends = sum(int((tokens[answer] == END).sum()) for tokens, answer in map(data.__getitem__, range(len(data))))
    held = TokenData.open(whole[0], "held-out")
    ends += sum(int((tokens[answer] == END).sum()) for tokens, answer in map(held.__getitem__, range(len(held))))
    assert ends == about["counts"]["stopped"] > 0


def test_counts_tell_what_happened(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, about = whole
    assert about["prompts"]["duplicates"] == 1
    assert about["prompts"]["kept"] == sum(about["prompts"]["sources"].values())
    counts = about["counts"]
    assert counts["too_long"] >= 1 and about["prompts"]["sources"]["book.txt"] == 1
    train, held = TokenData.open(folder), TokenData.open(folder, "held-out")
    assert len(train) + len(held) == counts["texts"] and len(held) == counts["held_out"] > 0
    assert sum(int(data[i][1].sum()) for data in (train, held) for i in range(len(data))) == counts["answer_tokens"]
    assert 0 < counts["greedy"] < counts["answers"]
    assert json.loads((folder / "data.json").read_text())["counts"] == counts


@pytest.mark.parametrize("batch", [1, 9])
def test_the_files_do_not_depend_on_the_batch(
    whole: tuple[Path, dict[str, Any]], target: Target, files: list[str], tmp_path: Path, batch: int
) -> None:
    make_data(target, files, tmp_path / "other", SETTINGS, batch=batch)
    assert contents(tmp_path / "other") == contents(whole[0])


@pytest.mark.parametrize("kept", [True, False], ids=["interrupted", "killed"])
@pytest.mark.parametrize("after", [1, 9, 20])
def test_another_start_ends_the_same(
    whole: tuple[Path, dict[str, Any]],
    target: Target,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kept: bool,
    after: int,
) -> None:
    reports = 0

    def stop(_: Progress) -> None:
        nonlocal reports
        reports += 1
        if reports == after:
            raise KeyboardInterrupt

    again = tmp_path / "again"
    with monkeypatch.context() as patch:
        if not kept:
            patch.setattr(shards, "write_unfinished", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            make_data(target, files, again, SETTINGS, batch=4, report=stop)
    assert contents(again).keys() != contents(whole[0]).keys()
    asked = []
    about = make_data(target, files, again, SETTINGS, batch=4, resume=True, report=asked.append)
    assert contents(again) == contents(whole[0]) and about["counts"] == whole[1]["counts"]
    if kept:
        assert len(asked) <= whole[1]["counts"]["answers"] - after + 4 * 3  # only what was on its way is said again


def test_more_prompts_are_added_behind(target: Target, files: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    make_data(target, files[:1], folder, SETTINGS, limit=7, batch=4)
    before = contents(folder)
    about = make_data(target, files, folder, SETTINGS, batch=4, resume=True)
    after = contents(folder)
    assert before.items() <= after.items() and len(after) > len(before)
    keys = [key for file in shards.shard_files(folder, "train") for key in shards.Shard.read(file).prompts.tolist()]
    assert len(keys) == len(set(keys)) == about["prompts"]["kept"]


def test_a_folder_is_not_overwritten(whole: tuple[Path, dict[str, Any]], target: Target, files: list[str]) -> None:
    with pytest.raises(InputError, match="--resume"):
        make_data(target, files, whole[0], SETTINGS)
    with pytest.raises(InputError, match="was made with seed = 0, not 1"):
        make_data(target, files, whole[0], dataclasses.replace(SETTINGS, seed=1), resume=True)


def test_loops_are_found_and_cut(target: Target, tmp_path: Path) -> None:
    assert find_loop(list(range(30))) == (0, 23, None)
    assert find_loop([1, 2, 3] * 8) == (14, 17, 14)
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": f"{c}{d}"}) for c in "abcd" for d in "efgh"))
    settings = Settings(max_new_tokens=100, greedy_share=1.0, held_out=0.0, max_length=200)
    free = make_data(target, [str(tmp_path / "p.jsonl")], tmp_path / "free", settings)
    cut = make_data(
        target, [str(tmp_path / "p.jsonl")], tmp_path / "cut", dataclasses.replace(settings, cut_loops=True)
    )
    assert free["counts"]["loops"] == cut["counts"]["loops"] > 0 and free["repeated_share"] > 0
    longer, shorter = TokenData.open(tmp_path / "free"), TokenData.open(tmp_path / "cut")
    for (wanted, _), (found, answer) in zip(longer, shorter, strict=True):
        assert wanted[: len(found)].tolist() == found.tolist()
        loop = find_loop(found[answer].tolist())[2]
        assert loop in (None, int(answer.sum())) and (loop is None) == (len(found) == len(wanted))


# ---- prompts by the target


def test_where_a_user_begins(target: Target) -> None:
    ids, after = user_opening(target)
    assert target.tokenizer.decode(ids) == "<|user|>" and after == "<|end|>"


def test_the_target_asks_itself(target: Target, tmp_path: Path) -> None:
    about = make_data(target, [], tmp_path / "one", SETTINGS, self_prompts=6, batch=4)
    rows = [json.loads(line) for line in (tmp_path / "one/self-prompts.jsonl").read_text().splitlines()]
    texts = [row["text"] for row in rows if row["text"]]
    assert about["prompts"]["self"] == len({text.casefold() for text in texts}) == 6
    data = TokenData.open(tmp_path / "one")
    asked = target.tokenizer.decode(data[0][0][~data[0][1]].tolist())
    assert any(asked == f"<|user|>{text}<|end|><|assistant|>" for text in texts)
    make_data(target, [], tmp_path / "two", SETTINGS, self_prompts=6, batch=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    again = make_data(target, [], tmp_path / "one", SETTINGS, self_prompts=8, batch=4, resume=True)
    assert again["prompts"]["self"] == 8 and again["counts"]["answers"] > about["counts"]["answers"]


def test_a_user_needs_a_template(tmp_path: Path) -> None:
    bare = Target(tiny(), character_tokenizer(None), "bare")
    with pytest.raises(InputError, match="no chat template"):
        make_data(bare, [], tmp_path / "out", SETTINGS, self_prompts=2)
    (tmp_path / "p.jsonl").write_text('{"turns": ["One two", "three"]}')
    about = make_data(bare, [str(tmp_path / "p.jsonl")], tmp_path / "plain", SETTINGS)
    assert about["counts"]["answers"] == 1  # continued as a text, since it knows no turns


# ---- reading


def test_batches_hold_every_text_once_in_a_repeatable_order(whole: tuple[Path, dict[str, Any]]) -> None:
    data = TokenData.open(whole[0])
    plan = data.plan(max_tokens=200, max_length=100, seed=3, epoch=1)
    assert sorted(place for batch in plan for place in batch) == list(range(len(data)))
    assert plan == TokenData.open(whole[0]).plan(200, 100, 3, 1)
    assert plan != data.plan(200, 100, 3, 2) and plan != data.plan(200, 100, 4, 1)
    batches = list(data.batches(200, 100, 3, 1))
    for places, batch in zip(plan, batches, strict=True):
        assert batch.tokens.numel() <= 200 or len(places) == 1
        for row, place in enumerate(places):
            tokens, answer = (part[:100] for part in data[place])
            size = int(batch.lengths[row])
            assert batch.tokens[row, :size].tolist() == tokens.tolist() and not batch.answer[row, size:].any()
            assert batch.answer[row, :size].tolist() == answer.tolist()
    later = list(data.batches(200, 100, 3, 1, start=2))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(batches[2:], later, strict=True))


def test_texts_without_an_answer_in_reach_are_left_out(whole: tuple[Path, dict[str, Any]]) -> None:
    data = TokenData.open(whole[0])
    reach = 24
    found = {place for batch in data.plan(100, reach) for place in batch}
    assert found == {place for place in range(len(data)) if data[place][1][:reach].any()} < set(range(len(data)))


def test_token_counts(whole: tuple[Path, dict[str, Any]]) -> None:
    data = TokenData.open(whole[0])
    counts = token_counts(data)
    wanted = torch.zeros(61, dtype=torch.long)
    for tokens, answer in data:
        for token in tokens[answer].tolist():
            wanted[token] += 1
    assert torch.equal(counts, wanted) and counts.sum() > 0


def test_what_cannot_be_read(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="windfall train data"):
        TokenData.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match="train or held-out"):
        TokenData.open(whole[0], "test")
    shutil.copytree(whole[0], tmp_path / "damaged")
    (tmp_path / "damaged/train-00001.safetensors").write_bytes(b"xx")
    with pytest.raises(InputError, match="damaged or incomplete"):
        TokenData.open(tmp_path / "damaged")


# ---- the command


def test_the_command(files: list[str], tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    tiny(eos_token_id=END).save_pretrained(model)
    character_tokenizer().save_pretrained(model)
    given = ["train", "data", *files, "--target", model, "--out", out, "--max-new-tokens", 8, "--limit", 9]
    result = windfall(*given, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["counts"]["answers"] > 0
    assert "holds data already" in refused(*given)
    assert windfall(*given, "--resume").exit_code == 0
    assert "no prompts" in refused("train", "data", "--target", model, "--out", tmp_path / "no")
    assert "greedy_share must be between 0 and 1" in refused(*given, "--greedy-share", 2)
