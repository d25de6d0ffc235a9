"""Batches and their rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from windfall.train.batch import Batch, Rows

TOKENS = torch.arange(15).view(3, 5)
ANSWER = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()


def test_answer_rows_precede_tokens_that_the_target_generated() -> None:
    batch = Batch(TOKENS, ANSWER)
    assert batch.answered.nonzero().tolist() == [[0, 1], [0, 3], [2, 2], [2, 3]], "no column is before row 0"
    assert torch.stack([*batch.rows], 1).tolist() == batch.answered.nonzero().tolist()
    assert TOKENS[batch.rows].tolist() == TOKENS[:, :-1][batch.answered].tolist() == [1, 3, 12, 13]
    assert replace(batch, answer=ANSWER & False).rows.texts.tolist() == []


def test_rows_of_a_mask() -> None:
    found = Rows.where(ANSWER, torch.device("cpu"))
    assert TOKENS[found].tolist() == TOKENS[ANSWER].tolist()


def test_masks_and_lengths_stay_on_the_host() -> None:
    batch = Batch(TOKENS, ANSWER, torch.tensor([5, 2, 5]), torch.tensor([0.0, 1.0, torch.nan]))
    same, there = batch.to(torch.device("cpu")), batch.to(torch.device("meta"))
    assert torch.equal(same.tokens, TOKENS) and torch.equal(same.answer, ANSWER)
    assert there.tokens.is_meta and there.temperatures is not None and there.temperatures.is_meta
    assert not there.answer.is_meta and there.lengths is batch.lengths, "the host chooses rows"
