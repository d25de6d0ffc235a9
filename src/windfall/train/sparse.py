"""Cross-entropy against a few likely tokens of each distribution, all others taken together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from windfall.train.losses import CHUNK


class Sparse(NamedTuple):
    """The likeliest tokens of some distributions, likeliest first, and what remains of each."""

    tokens: Tensor  # [.., n] long
    chances: Tensor  # [.., n]
    tail: Tensor  # [..]

    @classmethod
    def sure(cls, tokens: Tensor) -> Sparse:
        """Nothing but these tokens [..]."""
        chances = torch.ones(*tokens.shape, 1, device=tokens.device)
        return cls(tokens[..., None], chances, torch.zeros(tokens.shape, device=tokens.device))

    def among(self, drafted: Tensor | None) -> Sparse:
        """Tokens by their place in `drafted` [Vd]; one that is not there is -1 and counts for nothing."""
        if drafted is None:
            return self
        places = torch.full((int(max(drafted.max(), self.tokens.max())) + 1,), -1, device=drafted.device)
        places[drafted] = torch.arange(len(drafted), device=drafted.device)
        own = places[self.tokens]
        return Sparse(own, self.chances * (own >= 0), self.tail)


class Judged(NamedTuple):
    """What some guesses come to."""

    loss: Tensor  # weighted sum, differentiable
    entropy: Tensor  # mean over the rows that count
    hits: Tensor  # how often the first choice is the likeliest token


def judge_sparse(logits: Callable[[Tensor], Tensor], states: Tensor, labels: Sparse, weights: Tensor) -> Judged:
    """States [N, H], from which `logits` makes [N, Vd], labels by place there, weights [N].

    Only a bounded number of logits lives at a time; they are made anew on the way back.
    """
    width = logits(states[:1].detach()).shape[-1]
    size = max(1, CHUNK // width)
    losses, hits = [states.new_zeros(0, dtype=torch.float32)], [states.new_zeros(0, dtype=torch.bool)]
    for part in (slice(start, start + size) for start in range(0, len(states), size)):
        given = (logits, states[part], *(x[part] for x in labels))
        loss, hit = checkpoint(_coarse, *given, use_reentrant=False)
        losses.append(loss)
        hits.append(hit)
    found, counted = torch.cat(losses), weights > 0
    count = counted.sum().clamp(min=1)
    entropy = (found.detach() * counted).sum() / count
    return Judged((found * weights).sum(), entropy, (torch.cat(hits) & counted).sum() / count)


def _coarse(
    logits: Callable[[Tensor], Tensor], states: Tensor, places: Tensor, chances: Tensor, tail: Tensor
) -> tuple[Tensor, Tensor]:
    """Of each row [n], the cross-entropy and whether the first choice is the likeliest token."""
    given = logits(states).float()
    logq = (given - given.logsumexp(-1, keepdim=True)).gather(1, places.clamp(min=0))
    kept = torch.where(places >= 0, logq.exp(), 0).sum(-1)
    others = torch.log1p(-kept.clamp(max=1 - 1e-6))
    return -(chances * logq).sum(-1) - tail * others, given.argmax(-1) == places[:, 0]
