"""Levels of a tree that one pass predicts: the distribution of a token before the token above it is known.

A level keeps the scores of a few candidates and one number for all other tokens, the tail. Pair scores, which depend on
the token above a node, are added to the candidates only:

    log q(b | a) = score(b) + weight * pair(a, b) - log Z(a),   Z(a) = sum of exp over the candidates + exp(tail)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64  # candidates that `most_likely` looks at together


class Level(NamedTuple):
    """One or more levels; all scores are in fp32 and need not be normalised."""

    tokens: Tensor  # [.., K] draft ids of the candidates, best first
    scores: Tensor  # [.., K]
    tail: Tensor  # [..] log of the sum of exp(score) over all other tokens
    weight: float = 1.0  # of pair scores

    def at(self, depths: Tensor) -> Level:
        """The levels of several nodes [n], by their depths."""
        return Level(self.tokens[depths], self.scores[depths], self.tail[depths], self.weight)

    def log_probabilities(self, pairs: Tensor | None = None) -> Tensor:
        """log q [.., K] of the candidates, with pair scores of the same shape."""
        scores = self.scores if pairs is None else self.scores + self.weight * pairs.float()
        total = torch.logaddexp(scores.logsumexp(-1), self.tail)
        return scores - total[..., None]


def find_level(scores: Tensor, count: int, weight: float = 1.0) -> Level:
    """The `count` best of scores [n, V], and the rest as one number. -inf excludes a token.

    The scores are logits or, for coupled drafting, what `Dice.race` makes of them; then `weight` is `Dice.weight`.
    """
    scores = scores.float()
    values, tokens = most_likely(scores, min(count, scores.shape[-1]))
    return Level(tokens, values, scores.scatter(-1, tokens, -torch.inf).logsumexp(-1), weight)


def entropies(scores: Tensor, level: Level, pairs: Tensor | None, depths: Tensor) -> Tensor:
    """The entropy in nats of q(. | a), [n], of nodes with these depths; scores [levels, V] are those of the levels.

    The tail is counted token by token: with x its scores, -sum of p log p = (log Z - mean of x under p) * its share.
    """
    own = level.at(depths)
    logq = own.log_probabilities(pairs)
    share = (1 - logq.exp().sum(-1)).clamp(min=0)
    log_z = own.scores[:, 0] + (0 if pairs is None else own.weight * pairs[:, 0].float()) - logq[:, 0]
    rest = scores.float().scatter(-1, level.tokens, -torch.inf)
    mean = (torch.softmax(rest, -1) * rest.nan_to_num(neginf=0.0)).sum(-1).nan_to_num()[depths]
    found: Tensor = torch.special.entr(logq.exp()).sum(-1) + share * (log_z - mean)
    return found


def most_likely(logq: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row [n, M] and their places; on a CPU first the best blocks, then the best within them."""
    rows, size = logq.shape
    if logq.device.type != "cpu" or size % BLOCK or size < 2 * k * BLOCK:
        found = logq.topk(k, dim=-1)
        return found.values, found.indices
    blocks = logq.view(rows, -1, BLOCK)
    best = blocks.amax(-1).topk(k, dim=-1, sorted=False).indices  # [n, k]: the k largest are within these blocks
    values, place = blocks.gather(1, best[..., None].expand(-1, -1, BLOCK)).flatten(1).topk(k, dim=-1)
    return values, best.gather(1, place // BLOCK) * BLOCK + place % BLOCK
