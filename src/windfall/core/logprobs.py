"""Log-probabilities of tokens, with the most likely tokens at each place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RAW, PROCESSED = "raw", "processed"  # the model's own distribution, or the one that the token was drawn from
MODES = (RAW, PROCESSED)
LOWEST = -9999.0  # stands for minus infinity in JSON, which does not have it


class TokenLogprob(NamedTuple):
    """A token with its log-probability, and the most likely tokens at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, log-probability), the most likely first; not those of -inf


def token_logprobs(logits: Tensor, tokens: list[int], count: int) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of one token for each row of logits [n, V], and of the `count` most likely ones.

    They are computed in float32, or in float64 if the logits are.
    """
    logs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    chosen = logs.gather(1, torch.tensor(tokens, device=logs.device)[:, None])[:, 0].tolist()
    most = min(count, logs.shape[-1])
    tops = [top_tokens(row, most) if most else () for row in logs]
    return tuple(map(TokenLogprob, tokens, chosen, tops))


def top_tokens(row: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The most likely tokens of a row of log-probabilities [V]; of equally likely ones, those with the lower ids."""
    lowest = row.topk(count).values[-1]
    ids = ((row >= lowest) & (row > -torch.inf)).nonzero()[:, 0]  # more than `count` if there are ties
    values, order = row[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order][:count].tolist(), values[:count].tolist(), strict=True))
