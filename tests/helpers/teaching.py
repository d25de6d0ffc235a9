"""Batches, heads and teacher outputs for the tests of training objectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.random_heads import Chain, random_head
from helpers.tiny import prompt, tiny
from windfall.heads.base import FeatureHead, Guess
from windfall.heads.fitting import fit
from windfall.model.target import Target
from windfall.train.batch import Batch
from windfall.train.teacher import Teacher, TeacherOutput

LENGTH = 20


def batch(count: int = 2, length: int = LENGTH, start: int = 6) -> Batch:
    """Random texts whose later part counts as generated; the second one ends early."""
    tokens = torch.tensor([prompt(length, seed) for seed in range(count)])
    answer = torch.zeros_like(tokens, dtype=torch.bool)
    answer[:, start:] = True
    answer[1:, length - 4 :] = False
    return Batch(tokens, answer, torch.tensor([length] + [length - 4] * (count - 1)))


def teach(kind: str, given: Batch | None = None, family: str = "llama") -> tuple[FeatureHead, Teacher, TeacherOutput]:
    """A random head, a teacher and its outputs over a batch."""
    target = Target(tiny(family, num_hidden_layers=4))
    head = fit(random_head(kind), target)
    teacher = Teacher(target.model, head.config.taps)
    return head, teacher, teacher.run(given or batch())


@torch.no_grad()
def drafted(head: FeatureHead, outputs: TeacherOutput, row: int, column: int, path: list[int]) -> Guess:
    """The guess after `path`, drafted from this column one row at a time, as in decoding."""
    memory, columns = Chain(head), column + 1
    hidden = head.fuse(outputs.features[row : row + 1, :columns])
    tokens = outputs.batch.tokens[row : row + 1, 1 : columns + 1]
    guess: Guess = head(tokens, hidden, torch.arange(columns)[None], memory)
    for step, token in enumerate(path):
        guess = head(torch.tensor([[token]]), guess.recycled[:, -1:], torch.tensor([[columns + step]]), memory)
    return Guess(guess.state[0, -1], guess.recycled[0, -1])


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def greedy(model: Any, start: list[int], length: int) -> Tensor:
    tokens = torch.tensor([start])
    with torch.no_grad():
        while tokens.shape[1] < length:
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens
