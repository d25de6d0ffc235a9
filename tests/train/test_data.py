"""`make_data`: the shards hold the target's answers, however the run was interrupted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.cli import character_tokenizer, refused, windfall
from helpers.tiny import tiny
from windfall import registry
from windfall.core.sampling import gumbel
from windfall.core.types import GpuOptions, InputError
from windfall.engine.engine import Engine
from windfall.model.target import Target
from windfall.train import shards
from windfall.train.data import Progress, Settings, find_loop, make_data, user_opening
from windfall.train.shards import TokenData

END = 4  # <|end|>
SETTINGS = Settings(max_new_tokens=8, held_out=0.3, shard=5, max_length=120)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny(num_hidden_layers=2, eos_token_id=END), character_tokenizer(), "tiny")


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


def plain(target: Target, batch: int = 4, **gpu: bool) -> Engine:
    """An engine without drafts, for this many texts at once."""
    drafter, policy = registry.drafter("ngram"), registry.policy("none")
    return Engine(target, drafter, policy, gpu_options=GpuOptions(**gpu), max_requests=batch)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def whole(target: Target, files: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, make_data(plain(target), files, folder, SETTINGS)


def test_the_answer_mask_marks_exactly_the_generated_tokens(target: Target, tmp_path: Path) -> None:
    turns = ("What is stone", "And then", "Why")
    (tmp_path / "p.jsonl").write_text(json.dumps({"turns": turns}))
    settings = dataclasses.replace(SETTINGS, held_out=0.0, greedy_share=1.0, max_length=250)
    about = make_data(plain(target), [str(tmp_path / "p.jsonl")], tmp_path / "out", settings)
    engine = plain(target)
    messages: list[dict[str, str]] = []
    tokens: list[int] = []
    answer: list[bool] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        asked = engine.encode(messages)
        made = engine.generate(messages, max_new_tokens=8).token_ids
        assert asked[: len(tokens)] == tokens
        answer += [False] * (len(asked) - len(tokens)) + [True] * len(made)
        tokens = asked + made
        said = target.tokenizer.decode(made, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": said})
    data = TokenData.open(tmp_path / "out")
    assert len(data) == 1 and data[0][0].dtype == torch.int32
    assert data[0][0].tolist() == tokens and data[0][1].tolist() == answer
    assert about["counts"]["answers"] == 3 and about["finished"]


def test_stop_tokens_belong_to_the_answer(whole: tuple[Path, dict[str, Any]]) -> None:
    data, about = TokenData.open(whole[0]), whole[1]
    ends = sum(int((tokens[answer] == END).sum()) for tokens, answer in map(data.__getitem__, range(len(data))))
    held = TokenData.open(whole[0], "held-out")
    ends += sum(int((tokens[answer] == END).sum()) for tokens, answer in map(held.__getitem__, range(len(held))))
    assert ends == about["counts"]["stopped"] > 0


def test_the_shards_record_how_answers_were_drawn(whole: tuple[Path, dict[str, Any]], target: Target) -> None:
    """The recorded temperature and seed give exactly the tokens of the answers."""
    data, kinds = TokenData.open(whole[0]), set()
    for index, (tokens, answer) in enumerate(data):
        temperature, seed = data.sampling(index)
        assert temperature is not None and seed is not None
        kinds.add(temperature)
        places = answer.nonzero().flatten()
        with torch.no_grad():
            scores = target.model(tokens[None].long()).logits[0, places - 1]
        if temperature:
            scores = scores / temperature + gumbel(seed, places, torch.arange(scores.shape[-1]))
        assert scores.argmax(-1).tolist() == tokens[places].tolist()
    assert kinds == {0.0, 1.0}
    batch = next(data.batches(400, 120))
    assert batch.temperatures is not None and len(batch.temperatures) == len(batch.tokens)


def test_counts_in_the_metadata(whole: tuple[Path, dict[str, Any]]) -> None:
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
    make_data(plain(target, batch), files, tmp_path / "other", SETTINGS)
    assert contents(tmp_path / "other") == contents(whole[0])


def test_the_files_do_not_depend_on_the_runner(
    whole: tuple[Path, dict[str, Any]], target: Target, files: list[str], tmp_path: Path
) -> None:
    engine = plain(target, graphs=True, pages=True)
    make_data(engine, files, tmp_path / "pages", SETTINGS)
    assert not engine.batch_fallback and contents(tmp_path / "pages") == contents(whole[0])
    drafting = Engine(target, registry.drafter("ngram"), registry.policy("chain"), max_requests=4)
    make_data(drafting, files, tmp_path / "drafts", SETTINGS)
    assert contents(tmp_path / "drafts") == contents(whole[0])


@pytest.mark.parametrize(
    ("saves", "after"), [(True, 1), (True, 20), (False, 9)], ids=["interrupted early", "interrupted late", "killed"]
)
def test_a_resumed_run_gives_the_same_files(
    whole: tuple[Path, dict[str, Any]],
    target: Target,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    saves: bool,
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
        if not saves:
            patch.setattr(shards, "write_unfinished", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            make_data(plain(target), files, again, SETTINGS, report=stop)
    assert contents(again).keys() != contents(whole[0]).keys()
    asked = []
    about = make_data(plain(target), files, again, SETTINGS, resume=True, report=asked.append)
    assert contents(again) == contents(whole[0]) and about["counts"] == whole[1]["counts"]
    if saves:
        assert len(asked) <= whole[1]["counts"]["answers"] - after + 4 * 3  # only running conversations are repeated


@pytest.mark.parametrize("seconds", [0, 12])
def test_a_paused_run_goes_on(
    whole: tuple[Path, dict[str, Any]],
    target: Target,
    files: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: int,
) -> None:
    with monkeypatch.context() as patch:
        # a second for each prompt
        clock = SimpleNamespace(monotonic=itertools.count().__next__, strftime=time.strftime)
        patch.setattr("windfall.train.data.time", clock)
        about = make_data(plain(target), files, tmp_path / "cut", SETTINGS, pause_after=seconds / 60)
    assert not about["finished"] and about["counts"].get("answers", 0) < whole[1]["counts"]["answers"]
    assert (shards.read_unfinished(tmp_path / "cut") == {}) is (seconds == 0)
    about = make_data(plain(target), files, tmp_path / "cut", SETTINGS, resume=True)
    assert about["finished"] and contents(tmp_path / "cut") == contents(whole[0])


def test_more_prompts_are_added_in_new_shards(target: Target, files: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    make_data(plain(target), files[:1], folder, SETTINGS, limit=7)
    before = contents(folder)
    about = make_data(plain(target), files, folder, SETTINGS, resume=True)
    after = contents(folder)
    assert before.items() <= after.items() and len(after) > len(before)
    keys = [key for file in shards.shard_files(folder, "train") for key in shards.Shard.read(file).prompts.tolist()]
    assert len(keys) == len(set(keys)) == about["prompts"]["kept"]


def test_existing_data_is_not_overwritten(whole: tuple[Path, dict[str, Any]], target: Target, files: list[str]) -> None:
    with pytest.raises(InputError, match="--resume"):
        make_data(plain(target), files, whole[0], SETTINGS)
    with pytest.raises(InputError, match="was made with seed = 0, not 1"):
        make_data(plain(target), files, whole[0], dataclasses.replace(SETTINGS, seed=1), resume=True)


def test_loops_are_found_and_cut(target: Target, tmp_path: Path) -> None:
    assert find_loop(list(range(30))) == (0, 23, None)
    assert find_loop([1, 2, 3] * 8) == (14, 17, 14)
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps({"prompt": f"{c}{d}"}) for c in "abcd" for d in "ef"))
    settings = Settings(max_new_tokens=60, greedy_share=1.0, held_out=0.0, max_length=200)
    free = make_data(plain(target), [str(tmp_path / "p.jsonl")], tmp_path / "free", settings)
    cut = make_data(
        plain(target), [str(tmp_path / "p.jsonl")], tmp_path / "cut", dataclasses.replace(settings, cut_loops=True)
    )
    assert free["counts"]["loops"] == cut["counts"]["loops"] > 0 and free["repeated_share"] > 0
    longer, shorter = TokenData.open(tmp_path / "free"), TokenData.open(tmp_path / "cut")
    for (wanted, _), (found, answer) in zip(longer, shorter, strict=True):
        assert wanted[: len(found)].tolist() == found.tolist()
        loop = find_loop(found[answer].tolist())[2]
        assert loop in (None, int(answer.sum())) and (loop is None) == (len(found) == len(wanted))


# ---- prompts that the target generates


def test_the_opening_of_a_user_turn(target: Target) -> None:
    ids, after = user_opening(target)
    assert target.tokenizer.decode(ids) == "<|user|>" and after == "<|end|>"


def test_the_target_generates_prompts(tmp_path: Path) -> None:
    target = Target(tiny(eos_token_id=END), character_tokenizer(), "tiny")  # ends its turns soon
    about = make_data(plain(target), [], tmp_path / "one", SETTINGS, self_prompts=4)
    rows = [json.loads(line) for line in (tmp_path / "one/self-prompts.jsonl").read_text().splitlines()]
    texts = [row["text"] for row in rows if row["text"]]
    assert about["prompts"]["self"] == len({text.casefold() for text in texts}) == 4
    data = TokenData.open(tmp_path / "one")
    asked = target.tokenizer.decode(data[0][0][~data[0][1]].tolist())
    assert any(asked == f"<|user|>{text}<|end|><|assistant|>" for text in texts)
    make_data(plain(target, 2), [], tmp_path / "two", SETTINGS, self_prompts=4)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    again = make_data(plain(target), [], tmp_path / "one", SETTINGS, self_prompts=7, resume=True)
    assert again["prompts"]["self"] == 7 and again["counts"]["answers"] > about["counts"]["answers"]


def test_generated_prompts_need_a_chat_template(tmp_path: Path) -> None:
    bare = Target(tiny(), character_tokenizer(None), "bare")
    with pytest.raises(InputError, match="no chat template"):
        make_data(plain(bare), [], tmp_path / "out", SETTINGS, self_prompts=2)
    (tmp_path / "p.jsonl").write_text('{"turns": ["One two", "three"]}')
    about = make_data(plain(bare), [str(tmp_path / "p.jsonl")], tmp_path / "plain", SETTINGS)
    assert about["counts"]["answers"] == 1  # continued as a text, because without a template it has no turns


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
    assert "greedy_share must be" in refused(*given, "--greedy-share", 2)
    assert "holds no data.json" in refused("train", "data", *files, "--out", model, "--resume")


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a" * 60}) + "\n")
    given = ["--target", tmp_path / "model", "--out", tmp_path / "out", "--max-length", 40]
    assert "left out: 1 prompt that is too long" in windfall("train", "data", tmp_path / "p.jsonl", *given).stderr
