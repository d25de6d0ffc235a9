"""Pair scores of block heads: how well token b follows token a, added to the logit of b.

The rows of a block do not know which tokens were chosen before them; a pair score makes up for that. All kinds are an
inner product of a query, which depends on the token before and the row's state, and a key, which depends on b alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from windfall.kernels.levels import PairTables, recur


class PairLookup(NamedTuple):
    """A pair score whose products with single tokens are done: what kernels need of it."""

    tables: PairTables  # `after` is by draft id [Vd, R]
    by_state: tuple[Tensor, Tensor | None] | None  # weight [R or 3R, H] and bias; None: the state does not matter


class PairScore(nn.Module):
    """score(a, b) = sum(query(a) * key(b)), both of `rank` numbers.

    Tokens before are ids of the target; candidates are draft ids. States are normed ones (`BlockHead.normed`).
    """

    def query(self, previous: Tensor, states: Tensor, carry: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Queries [.., R] for rows with states [.., H], and what the next row of the path takes as `carry`.

        previous [..]: the token at the position before the predicted one. carry: of the path's row before; None at
        the first row of a block. Only "path" and "rnn" have one.
        """
        raise NotImplementedError

    def keys(self, candidates: Tensor) -> Tensor:
        """[..] → [.., R]"""
        raise NotImplementedError

    def attach(self, embedding: Tensor, draft_tokens: Tensor | None) -> None:
        """The embedding [V, H], and the target ids of draft ids [Vd]; None: they are the same."""

    def prepare(self) -> None:
        """Compute what can be computed once; used when not training."""

    def lookup(self) -> PairLookup:
        """After `prepare`."""
        raise NotImplementedError


class Projected(PairScore):
    """The tokens' embeddings, projected: no tables in the file. `scale` starts at 0, so a new one scores nothing."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.before = nn.Linear(width, rank, bias=False)
        self.after = nn.Linear(width, rank, bias=False)
        self.hidden = nn.Linear(width, rank, bias=False)
        self.scale = nn.Parameter(torch.zeros(1))
        self._embedding: Tensor | None = None
        self._draft_tokens: Tensor | None = None
        self._tables: tuple[Tensor, Tensor] | None = None  # [V, R] and [Vd, R]

    def attach(self, embedding: Tensor, draft_tokens: Tensor | None) -> None:
        self._embedding, self._draft_tokens, self._tables = embedding, draft_tokens, None

    @torch.no_grad()
    def prepare(self) -> None:
        assert self._embedding is not None
        drafted = self._embedding if self._draft_tokens is None else self._embedding[self._draft_tokens]
        self._tables = self.before(self._embedding), self.after(drafted) * self.scale

    @property
    def tables(self) -> tuple[Tensor, Tensor] | None:
        """Before [V, R] and after [Vd, R], once prepared; None in training, where they change."""
        return None if self.training else self._tables

    def query(self, previous: Tensor, states: Tensor, carry: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self._before(previous) * self.hidden(states), None

    def keys(self, candidates: Tensor) -> Tensor:
        if self.tables is not None:
            return self.tables[1][candidates]
        tokens = candidates if self._draft_tokens is None else self._draft_tokens[candidates]
        found: Tensor = self.after(self._embedded(tokens)) * self.scale
        return found

    def lookup(self) -> PairLookup:
        assert self._tables is not None
        return PairLookup(PairTables(*self._tables), _parameters(self.hidden))

    def _before(self, previous: Tensor) -> Tensor:
        found: Tensor = self.before(self._embedded(previous)) if self.tables is None else self.tables[0][previous]
        return found

    def _embedded(self, tokens: Tensor) -> Tensor:
        assert self._embedding is not None
        return nn.functional.embedding(tokens, self._embedding)


class Path(Projected):
    """As `Projected`, but a recurrent state carries all tokens of the path."""

    def __init__(self, width: int, rank: int):
        super().__init__(width, rank)
        self.before = nn.Linear(width, 3 * rank, bias=False)
        self.hidden = nn.Linear(width, 3 * rank)
        self.carried = nn.Linear(rank, 3 * rank, bias=False)

    def query(self, previous: Tensor, states: Tensor, carry: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        joint = self._before(previous) + self.hidden(states)
        joint = joint if carry is None else joint + self.carried(carry)
        return recur(joint, carry)

    def lookup(self) -> PairLookup:
        found = super().lookup()
        return found._replace(tables=found.tables._replace(carried=self.carried.weight.detach()))


class Tables(PairScore):
    """The base of the kinds with free tables: `before` [V, R] and `after` [Vd, R]."""

    def __init__(self, vocabulary: int, drafted: int, rank: int, spread: float = 0.02):
        super().__init__()
        self.before = nn.Parameter(torch.empty(vocabulary, rank).normal_(std=spread))
        self.after = nn.Parameter(torch.empty(drafted, rank).normal_(std=spread))

    def keys(self, candidates: Tensor) -> Tensor:
        return nn.functional.embedding(candidates, self.after)

    def lookup(self) -> PairLookup:
        return PairLookup(PairTables(self.before.detach(), self.after.detach()), None)

    def _before(self, previous: Tensor) -> Tensor:
        return nn.functional.embedding(previous, self.before)


class Selector(Tables):
    """DFlash 2: the state scales the token before, number by number."""

    def __init__(self, vocabulary: int, drafted: int, width: int, rank: int):
        super().__init__(vocabulary, drafted, rank)
        self.hidden = nn.Linear(width, rank, bias=False)

    def query(self, previous: Tensor, states: Tensor, carry: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self._before(previous) * self.hidden(states), None

    def lookup(self) -> PairLookup:
        return super().lookup()._replace(by_state=_parameters(self.hidden))


class Markov(Tables):
    """DSpark: the score depends on the two tokens alone."""

    def query(self, previous: Tensor, states: Tensor, carry: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self._before(previous), None


class Gated(Tables):
    """DSpark: the state closes some numbers of the token before."""

    def __init__(self, vocabulary: int, drafted: int, width: int, rank: int):
        super().__init__(vocabulary, drafted, rank)
        self.gate = nn.Linear(width + rank, rank)

    def query(self, previous: Tensor, states: Tensor, carry: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        before = self._before(previous)
        return torch.sigmoid(self.gate(torch.cat([states, before], -1))) * before, None

    @torch.no_grad()
    def lookup(self) -> PairLookup:
        rank = self.before.shape[1]
        by_state, by_token = torch.split(self.gate.weight, [self.gate.in_features - rank, rank], 1)
        before = torch.cat([self.before @ by_token.T, self.before], 1)
        return PairLookup(PairTables(before, self.after.detach()), (by_state.contiguous(), self.gate.bias.detach()))


class Recurrent(Tables):
    """DSpark: a recurrent state carries the tokens of the whole path."""

    def __init__(self, vocabulary: int, drafted: int, width: int, rank: int):
        super().__init__(vocabulary, drafted, rank)
        self.joint = nn.Linear(2 * rank + width, 3 * rank)

    def query(self, previous: Tensor, states: Tensor, carry: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        before = self._before(previous)
        carry = torch.zeros_like(before) if carry is None else carry
        return recur(self.joint(torch.cat([carry, before, states], -1)), carry)

    @torch.no_grad()
    def lookup(self) -> PairLookup:
        rank = self.before.shape[1]
        sizes = [rank, rank, self.joint.in_features - 2 * rank]
        carried, by_token, by_state = (part.contiguous() for part in torch.split(self.joint.weight, sizes, 1))
        tables = PairTables(self.before @ by_token.T, self.after.detach(), carried)
        return PairLookup(tables, (by_state, self.joint.bias.detach()))


def _parameters(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return layer.weight.detach(), None if layer.bias is None else layer.bias.detach()


def new_pair_score(kind: str, vocabulary: int, drafted: int, width: int, rank: int) -> PairScore | None:
    """None for "none"."""
    if kind == "none":
        return None
    if kind in ("projected", "path"):
        return {"projected": Projected, "path": Path}[kind](width, rank)
    if kind == "markov":
        return Markov(vocabulary, drafted, rank)
    kinds = {"selector": Selector, "gated": Gated, "rnn": Recurrent}
    return kinds[kind](vocabulary, drafted, width, rank)
