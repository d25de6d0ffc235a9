"""Log-probabilities of tokens, with the most likely tokens at each place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

RAW, PROCESSED = "raw", "processed"  # the model's own distribution, or the one that the token was drawn from
MODES = (RAW, PROCESSED)
MAX_ROWS = 256  # whose log-probabilities are computed together: more would take much memory
SPARE = 16  # tokens after the most likely ones, to break ties of rounded logits without asking the device again
LOWEST = -9999.0  # stands for minus infinity in JSON, which does not have it


class TokenLogprob(NamedTuple):
    """A token with its log-probability, and the most likely tokens at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token, log-probability), the most likely first; not those of -inf


class Asked(NamedTuple):
    """The log-probabilities that a text wants."""

    logits: Tensor  # [n, V]
    tokens: list[int]  # one for each row
    most_likely: int  # number of the most likely tokens to list


def token_logprobs(logits: Tensor, tokens: list[int], count: int) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of one token for each row of logits [n, V], and of the `count` most likely ones.

    They are computed in float32, or in float64 if the logits are.
    """
    (found,) = token_logprobs_of_all([Asked(logits, tokens, count)])
    return found


def token_logprobs_of_all(asked: Sequence[Asked]) -> list[tuple[TokenLogprob, ...]]:
    """The same for several texts, whose results come from the device together."""
    found: list[tuple[TokenLogprob, ...]] = []
    part: list[Asked] = []
    for own in asked:
        if part and sum(len(each.tokens) for each in (*part, own)) > MAX_ROWS:
            found += _together(part)
            part = []
        part.append(own)
    return found + _together(part) if part else found


def _together(asked: list[Asked]) -> list[tuple[TokenLogprob, ...]]:
    import torch  # on first use: a process without a model can do without it

    logits = torch.cat([own.logits for own in asked]) if len(asked) > 1 else asked[0].logits
    logs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    tokens, size = [token for own in asked for token in own.tokens], logs.shape[-1]
    chosen = logs.gather(1, torch.tensor(tokens, device=logs.device)[:, None])[:, 0].tolist()
    most = min(max(own.most_likely for own in asked), size)
    best = logs.topk(min(most + SPARE, size)) if most else None
    ids, values = ([], []) if best is None else (best.indices.tolist(), best.values.tolist())
    found, end = [], 0
    for own in asked:
        start, end, count = end, end + len(own.tokens), min(own.most_likely, size)
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(own.tokens)
        if count:
            tops = [_in_order(logs, row, ids[row], values[row], count) for row in range(start, end)]
        found.append(tuple(map(TokenLogprob, own.tokens, chosen[start:end], tops)))
    return found


def _in_order(logs: Tensor, row: int, ids: list[int], values: list[float], count: int) -> tuple[tuple[int, float], ...]:
    """The first `count` of these most likely tokens of a row of logs [n, V]; more are given, unless the row ends.

    Of equally likely tokens, those with the lower ids come first.
    """
    last = values[count - 1]
    if values[-1] == last and len(values) < logs.shape[-1] and last > -math.inf:  # the tie may go on
        ids = (logs[row] >= last).nonzero()[:, 0].tolist()
        values = logs[row][ids].tolist()
    pairs = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple((token, value) for token, value in pairs[:count] if value > -math.inf)
