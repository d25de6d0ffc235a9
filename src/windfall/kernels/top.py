"""The likeliest children of the nodes of a draft pass, ranked by what the target will draw where that is known."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import chains, on_triton
from windfall.kernels.draw import noise_at

MOST = 16  # children of a node that the kernel takes


class Words(NamedTuple):
    """Logits [w, V] that nobody has multiplied yet."""

    states: Tensor  # [w, H]
    vocabulary: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]

    @property
    def logits(self) -> Tensor:
        return F.linear(*self)


def top_children(
    logits: Tensor | Words,  # [w, V]
    k: int,
    positions: Tensor | None = None,  # [w] long; with it come the next three, each one number on the device
    seed: Tensor | None = None,  # int64
    temperature: Tensor | None = None,  # fp32, above 0
    kappa: Tensor | None = None,  # fp32
    tokens: Tensor | None = None,  # [V] long: the token of each column
    offset: int = 0,  # that the draws' positions have over these
    noise: Tensor | None = None,  # what `roll` made, where it has been
) -> tuple[Tensor, Tensor]:
    """The k largest of log_softmax(x) for each row and their tokens → [w, k] fp32, [w, k] long.

    x is logits, or with dice (logits / temperature + noise) / kappa; the lower column goes first at ties, but for more
    than MOST children on a GPU, where torch decides. Words are multiplied and searched in one kernel where that is
    possible and faster; else they are multiplied by torch.
    """
    if isinstance(logits, Words):
        quick = positions is None or noise is not None
        if quick and k <= MOST and on_triton(logits.states) and chains(logits.states.device):
            from windfall.kernels.triton.top import fits, top_words

            if fits(*logits[:2]):
                return top_words(*logits, k, positions, temperature, kappa, tokens, offset, noise)
        logits = logits.logits
    assert 0 < k <= logits.shape[-1]
    if on_triton(logits) and k > MOST:
        values, order = _scores(logits, positions, seed, temperature, kappa, tokens, offset, noise).topk(k, dim=-1)
        return values, order if tokens is None else tokens[order]
    if on_triton(logits):
        from windfall.kernels.triton.top import top_children as compiled

        return compiled(logits, k, positions, seed, temperature, kappa, tokens, offset, noise)
    return reference(logits, k, positions, seed, temperature, kappa, tokens, offset, noise)


def reference(
    logits: Tensor,
    k: int,
    positions: Tensor | None = None,
    seed: Tensor | None = None,
    temperature: Tensor | None = None,
    kappa: Tensor | None = None,
    tokens: Tensor | None = None,
    offset: int = 0,
    noise: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scores = _scores(logits, positions, seed, temperature, kappa, tokens, offset, noise)
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    values, order = values[:, :k], order[:, :k]
    return values, order if tokens is None else tokens[order]


def _scores(
    logits: Tensor,
    positions: Tensor | None,
    seed: Tensor | None,
    temperature: Tensor | None,
    kappa: Tensor | None,
    tokens: Tensor | None,
    offset: int,
    noise: Tensor | None,
) -> Tensor:
    """log_softmax(x), [w, V]."""
    scores = logits.float()
    if positions is not None:
        assert seed is not None and temperature is not None and kappa is not None
        names = torch.arange(logits.shape[-1], device=logits.device) if tokens is None else tokens
        scores = (scores / temperature + noise_at(seed, positions + offset, names, noise)) / kappa
    return scores.log_softmax(-1)
