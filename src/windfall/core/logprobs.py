"""Log-probabilities of tokens, with the most likely tokens at each place."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
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
    import torch  # on first use: a process without a model can do without it

    logs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    chosen = logs.gather(1, torch.tensor(tokens, device=logs.device)[:, None])[:, 0].tolist()
    tops = top_tokens(logs, min(count, logs.shape[-1])) if count else [()] * len(tokens)
    return tuple(map(TokenLogprob, tokens, chosen, tops))


def top_tokens(logs: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The most likely tokens of rows of log-probabilities [n, V]; of equally likely ones, those with the lower ids."""
    found = logs.topk(min(count + 1, logs.shape[-1]))
    rows = zip(logs, found.indices.tolist(), found.values.tolist(), strict=True)
    return [_in_order(row, ids, values, count) for row, ids, values in rows]


def _in_order(row: Tensor, ids: list[int], values: list[float], count: int) -> tuple[tuple[int, float], ...]:
    """The first `count` of these most likely tokens of a row [V]; there is one more, unless the row ends."""
    last = values[count - 1]
    if values[count:] == [last] and last > -math.inf:  # a tie that topk has broken in its own way
        ids = (row >= last).nonzero()[:, 0].tolist()
        values = row[ids].tolist()
    pairs = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple((token, value) for token, value in pairs[:count] if value > -math.inf)
