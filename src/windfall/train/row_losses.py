"""Losses between the distributions of a drafter and of the target, row by row, with their gradients.

p is the target's distribution over its whole vocabulary, q the drafter's over the tokens that it drafts; q is 0 for all
other tokens. Only the drafted tokens of p are stored, so a row of p sums to its `mass`, which may be below 1.

- `kl`: mass-weighted cross-entropy, -sum p log q. It differs from the KL divergence by a constant.
- `tv`: total variation, 1 - alpha with alpha = sum min(p, q), the acceptance rate of rejection sampling.
- `lk`: lambda * KL + (1 - lambda) * TV, lambda = exp(-3 alpha) without gradient (LK losses, arXiv 2602.23881).
- `match`: -log m, where m is the probability that argmax(log q + g) = argmax(log p + g) for shared Gumbel noise g:
  m = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri, Musco & Suresh 2024). It is exact and sorts the vocabulary.
- `coupled`: -log softmax((log q + g) / KAPPA)_y for noise g and the token y that the target draws with it. This is the
  number by which coupled drafting ranks children.

Tokens that the head does not draft: the gradients of `kl`, `tv` and `lk` are at most proportional to the mass. `match`
is multiplied by the mass, and `coupled` is 0 where y is not drafted. So rows that the head cannot predict weigh little
in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from windfall.train.coupling import Coupling, TextRows, draw_coupling
from windfall.train.mixtures import Mixture

KAPPA = 0.9  # of `coupled`: the drafter's distribution counts a little more than at the target's temperature
LK_RATE = 3.0  # of `lk`


class RowTargets(NamedTuple):
    """What the target says about n rows, for the Vd tokens that the head drafts."""

    logp: Tensor  # [n, Vd], normalised over the target's whole vocabulary
    coupling: Coupling | None  # of the loss `coupled`

    def at(self, rows: Tensor) -> RowTargets:
        """Those of these rows [m], in this order."""
        coupling = None if self.coupling is None else Coupling(*(x[rows] for x in self.coupling))
        return RowTargets(self.logp[rows], coupling)


RowLoss = Callable[[Tensor, RowTargets], tuple[Tensor, Tensor]]  # logq [n, Vd] → losses [n], gradients by the logits


def row_targets(
    logits: Tensor,
    tokens: Tensor | None,
    mixture: Mixture,
    text: TextRows | None = None,
    generator: torch.Generator | None = None,
) -> RowTargets:
    """The targets of rows with these logits of the target [n, V], for a head that drafts `tokens` [Vd] (None: all).

    `text` and `generator` are used by `coupled` only; see `draw_coupling`. Without a generator, it is seeded from
    torch's global one.
    """
    coupling = None
    if any(name == "coupled" for name, _ in mixture):
        generator = new_generator(logits.device) if generator is None else generator
        indices = None if tokens is None else draft_indices(tokens, logits.shape[-1])
        coupling = draw_coupling(logits, indices, tokens, text, generator)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    total = torch.logsumexp(wide, -1, keepdim=True)
    return RowTargets((wide if tokens is None else wide[:, tokens]) - total, coupling)


def new_generator(device: torch.device, seed: int | None = None) -> torch.Generator:
    """A generator with this seed; None: one drawn from torch's global generator, which checkpoints record."""
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)


def draft_indices(draft_tokens: Tensor, vocab_size: int) -> Tensor:
    """[V]: the index of each token in the head's vocabulary [Vd], or -1."""
    indices = torch.full((vocab_size,), -1, device=draft_tokens.device)
    indices[draft_tokens] = torch.arange(len(draft_tokens), device=draft_tokens.device)
    return indices


def mixed(logits: Tensor, targets: RowTargets, mixture: Mixture) -> tuple[Tensor, Tensor]:
    """The weighted sum of these losses [n], and its gradient by the head's logits [n, Vd]."""
    logq = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    losses, slopes = logq.new_zeros(len(logq)), torch.zeros_like(logq)
    for name, weight in mixture:
        own_losses, own_slopes = ROW_LOSSES[name](logq, targets)
        losses, slopes = losses + weight * own_losses, slopes + weight * own_slopes
    return losses, slopes


# ---- the losses: log q [n, Vd] and targets → losses [n] and their gradients by the logits of q [n, Vd]


def kl(logq: Tensor, targets: RowTargets) -> tuple[Tensor, Tensor]:
    p = targets.logp.exp()
    return -_dot(p, logq), p.sum(-1, keepdim=True) * logq.exp() - p


def tv(logq: Tensor, targets: RowTargets) -> tuple[Tensor, Tensor]:
    p, q = targets.logp.exp(), logq.exp()
    rises = q * (q < p)  # where alpha rises with q
    return 1 - torch.minimum(p, q).sum(-1), q * rises.sum(-1, keepdim=True) - rises


def lk(logq: Tensor, targets: RowTargets) -> tuple[Tensor, Tensor]:
    total_variation, by_variation = tv(logq, targets)
    entropy, by_entropy = kl(logq, targets)
    divergence = entropy - torch.special.entr(targets.logp.exp()).sum(-1)
    share = torch.exp(-LK_RATE * (1 - total_variation))
    losses = share * divergence + (1 - share) * total_variation
    return losses, share[:, None] * by_entropy + (1 - share[:, None]) * by_variation


def match(logq: Tensor, targets: RowTargets) -> tuple[Tensor, Tensor]:
    """With r = q / p sorted: sum_j max(p_j / p_i, q_j / q_i) = Q(r >= r_i) / q_i + P(r < r_i) / p_i."""
    tiny = torch.finfo(logq.dtype).tiny
    order = (logq - targets.logp).argsort(-1, descending=True)
    p, q = targets.logp.exp(), logq.exp()
    mass = p.sum(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    above = q.cumsum(-1)  # Q(r >= r_i)
    below = ((mass[:, None] - p.cumsum(-1)).clamp(min=0) + (1 - mass[:, None])).clamp(
        min=0
    )  # P(r < r_i); outside r = 0
    inverse = 1 / q.clamp(min=tiny)
    terms = 1 / (above * inverse + below / p.clamp(min=tiny))  # the chance that i is drawn by both
    chance = terms.sum(-1).clamp(min=tiny)
    steep = terms * (terms * inverse)
    by_logit = steep * above - q * steep.flip(-1).cumsum(-1).flip(-1)  # of `chance`; it sums to 0
    slopes = torch.empty_like(q).scatter_(-1, order, by_logit)
    return -mass * chance.log(), slopes * (-mass / chance)[:, None]


def coupled(logq: Tensor, targets: RowTargets) -> tuple[Tensor, Tensor]:
    """At the temperature of the row's text."""
    coupling = targets.coupling
    assert coupling is not None
    drafted, place = (coupling.drawn >= 0)[:, None], coupling.drawn.clamp(min=0)[:, None]
    scale = coupling.temperatures[:, None]
    scores = torch.log_softmax((logq / scale + coupling.noise) / KAPPA, -1)
    is_drawn = torch.arange(logq.shape[-1], device=logq.device) == place
    slopes = (scores.exp() - is_drawn.to(scores.dtype)) * (drafted / (KAPPA * scale))
    return -(scores.gather(1, place) * drafted)[:, 0], slopes


def _dot(p: Tensor, logq: Tensor) -> Tensor:
    return (p * logq).sum(-1)


ROW_LOSSES: dict[str, RowLoss] = {"kl": kl, "tv": tv, "lk": lk, "match": match, "coupled": coupled}
