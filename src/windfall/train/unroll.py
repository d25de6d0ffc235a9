"""A head's own drafting, over whole texts at once: step s guesses from true features up to each column and from its own
for the s tokens after it, exactly as it would while decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.heads.base import FeatureHead, Guess
from windfall.train.attention import Chains
from windfall.train.teacher import Lesson


def unroll(
    head: FeatureHead, lesson: Lesson, steps: int, detach: bool = False, memory: Chains | None = None
) -> list[Guess]:
    """Chains along the text itself: step s, column t has read x[t+1+s] and guesses x[t+2+s].

    The last s columns of step s run out of text; they are computed and mean nothing.
    """
    tokens, memory, guesses = lesson.batch.tokens, memory or Chains(head.config.windows), []
    hidden = head.fuse(lesson.features[:, :-1])
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)[None]
    for step in range(steps):
        guess = head(tokens[:, 1:].roll(-step, 1), hidden, positions + step, memory)
        guesses.append(guess)
        hidden = guess.recycled.detach() if detach else guess.recycled
    return guesses


def aligned(head: FeatureHead, guesses: list[Guess], lesson: Lesson) -> tuple[Tensor, Tensor, Tensor]:
    """What the vocabulary reads [S, N, H], the target's states [N, Ht] and validity [S, N], row by row of the text.

    Row r of the target knows x[r+1]; step s guessed that in column r-1-s. Only the target's own words are guessed.
    """
    answer = lesson.batch.answer[:, 1:]  # by r, whether x[r+1] is the target's
    columns = answer.shape[1]
    rows = answer.clone()
    rows[:, 0] = False  # before it there is no column
    states, valid = [], []
    places = torch.arange(columns, device=answer.device)
    for step, guess in enumerate(guesses):
        shifted = guess.state.roll(1 + step, 1)  # [B, columns, H]; by r
        states.append(shifted[rows])
        valid.append((places > step).expand_as(rows)[rows])
    return head.normed(torch.stack(states)), lesson.final[:, :-1][rows], torch.stack(valid)
