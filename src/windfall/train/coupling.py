"""The Gumbel noise of coupled drafting, for training: noise under which the target draws a given token.

The target draws y = argmax(log p + g). Where y is known, the noise is drawn given y; where it is not, y follows from
the noise. Both give the same distribution of (y, g) if the known y were drawn from p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOWEST = 1e-30  # exponential numbers are at least this, so that their logarithm is finite


class TextRows(NamedTuple):
    """What the text says about rows: the token that follows each, and how it was drawn."""

    tokens: Tensor  # [n] long, ids of the target
    temperatures: Tensor  # [n] float; 0 or nan: not drawn from the distribution, or not known

    def part(self, rows: slice) -> TextRows:
        return TextRows(self.tokens[rows], self.temperatures[rows])


class Coupling(NamedTuple):
    """The noise of rows and the tokens that the target draws with it."""

    noise: Tensor  # [n, Vd], of the tokens that the head drafts
    drawn: Tensor  # [n] long, index of the drawn token among them; -1: the head does not draft it
    temperatures: Tensor  # [n], at which it is drawn


def draw_coupling(
    logits: Tensor, indices: Tensor | None, tokens: Tensor | None, text: TextRows | None, generator: torch.Generator
) -> Coupling:
    """Draw the noise of rows with these logits of the target [n, V].

    `tokens` [Vd] are the tokens that the head drafts and `indices` [V] their inverse (-1: absent); None: all tokens.
    Rows of texts drawn at a temperature get noise under which the target draws the text's next token. All other rows
    get fresh noise, temperature 1 and the token that follows from it; so do all rows if there is no `text`.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    count = len(wide)
    temperatures = wide.new_zeros(count) if text is None else text.temperatures.to(wide.dtype)
    known = temperatures > 0
    temperatures = torch.where(known, temperatures, torch.ones_like(temperatures))
    logp = torch.log_softmax(wide / temperatures[:, None], -1)
    logp = logp if tokens is None else logp[:, tokens]
    highest = torch.where(known, _gumbel(logp[:, 0], generator), torch.inf)  # of all log p + g
    noise = noise_below(logp, highest, generator)
    drawn = _argmax(logp, noise, generator, whole=tokens is None)
    if text is not None:
        given = text.tokens if indices is None else indices[text.tokens]
        drawn = torch.where(known, given, drawn)
        place = drawn.clamp(min=0)[:, None]
        at_drawn = torch.where(
            known & (drawn >= 0), highest - logp.gather(1, place)[:, 0], noise.gather(1, place)[:, 0]
        )
        noise = noise.scatter(1, place, at_drawn[:, None])
    return Coupling(noise, drawn, temperatures)


def noise_below(logp: Tensor, highest: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise g [n, V] given that all log p + g are below `highest` [n]; inf: no limit."""
    races = torch.empty_like(logp).exponential_(generator=generator).clamp_(min=LOWEST)
    return -torch.log(torch.exp(logp - highest[:, None]) + races)


def _argmax(logp: Tensor, noise: Tensor, generator: torch.Generator, whole: bool) -> Tensor:
    """The index of the highest log p + g [n], or -1 if a token that the head does not draft is higher."""
    best = (logp + noise).max(-1)
    if whole:
        return best.indices
    rest = (1 - logp.exp().sum(-1)).clamp(min=LOWEST).log() + _gumbel(best.values, generator)
    return torch.where(rest > best.values, -1, best.indices)


def _gumbel(like: Tensor, generator: torch.Generator) -> Tensor:
    return -torch.log(torch.empty_like(like).exponential_(generator=generator).clamp_(min=LOWEST))
