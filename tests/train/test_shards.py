"""Reading token shards: batches, counts and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from windfall.core.types import InputError
from windfall.train.shards import (
    UNKNOWN,
    FinishedPrompt,
    Sampling,
    Text,
    TokenData,
    token_counts,
    write_metadata,
    write_shard,
)

VOCABULARY = 61


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of 20 random texts; the answer begins after 5 to 30 tokens."""
    place, generator = tmp_path_factory.mktemp("shards"), torch.Generator().manual_seed(0)
    finished = []
    for key in range(20):
        start, size = torch.randint(5, 31, (2,), generator=generator).tolist()
        tokens = torch.randint(VOCABULARY, (start + size,), generator=generator).tolist()
        finished.append(FinishedPrompt(key, False, [Text(tokens, [False] * start + [True] * size)]))
    write_metadata(place, {"target": {"vocab_size": VOCABULARY}})
    write_shard(place, 0, finished[:10])
    write_shard(place, 1, finished[10:])
    return place


def test_batches_hold_every_text_once_in_a_repeatable_order(folder: Path) -> None:
    data = TokenData.open(folder)
    plan = data.plan(max_tokens=200, max_length=50, seed=3, epoch=1)
    assert sorted(index for batch in plan for index in batch) == list(range(len(data)))
    assert plan == TokenData.open(folder).plan(200, 50, 3, 1)
    assert plan != data.plan(200, 50, 3, 2) and plan != data.plan(200, 50, 4, 1)
    batches = list(data.batches(200, 50, 3, 1))
    for indices, batch in zip(plan, batches, strict=True):
        assert batch.tokens.numel() <= 200 or len(indices) == 1
        assert batch.lengths is not None
        for row, index in enumerate(indices):
            tokens, answer = (part[:50] for part in data[index])
            size = int(batch.lengths[row])
            assert batch.tokens[row, :size].tolist() == tokens.tolist() and not batch.answer[row, size:].any()
            assert batch.answer[row, :size].tolist() == answer.tolist()


def test_texts_without_an_answer_in_reach_are_left_out(folder: Path) -> None:
    data, reach = TokenData.open(folder), 18
    found = {index for batch in data.plan(100, reach) for index in batch}
    assert found == {index for index in range(len(data)) if data[index][1][:reach].any()} < set(range(len(data)))


def test_files_without_a_record_of_the_sampling(folder: Path, tmp_path: Path) -> None:
    """Files of earlier versions have no temperatures and seeds."""
    stored = load_file(folder / "train-00000.safetensors")
    write_metadata(tmp_path, {"target": {"vocab_size": VOCABULARY}})
    older = {name: tensor for name, tensor in stored.items() if name not in ("temperatures", "seeds")}
    save_file(older, str(tmp_path / "train-00000.safetensors"))
    known = FinishedPrompt(3, False, [Text([1, 2], [False, True], Sampling(0.7, 2**62))])
    write_shard(tmp_path, 1, [known])
    data = TokenData.open(tmp_path)
    assert [data.sampling(index) for index in (0, 10)] == [UNKNOWN, Sampling(0.7, 2**62)]
    batches = [batch.temperatures for batch in data.batches(100, 50)]
    temperatures = torch.cat([each for each in batches if each is not None])
    assert len(temperatures) == len(data) and int(temperatures.isnan().sum()) == 10
    torch.testing.assert_close(temperatures[~temperatures.isnan()], torch.tensor([0.7]))


def test_token_counts(folder: Path) -> None:
    data = TokenData.open(folder)
    wanted = torch.zeros(VOCABULARY, dtype=torch.long)
    for tokens, answer in data:
        for token in tokens[answer].tolist():
            wanted[token] += 1
    assert torch.equal(token_counts(data), wanted) and wanted.sum() > 0


def test_missing_and_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="windfall train data"):
        TokenData.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match="train or held-out"):
        TokenData.open(folder, "test")
    write_metadata(tmp_path, {"target": {"vocab_size": VOCABULARY}})
    (tmp_path / "train-00001.safetensors").write_bytes(b"xx")
    with pytest.raises(InputError, match="damaged or incomplete"):
        TokenData.open(tmp_path)
