"""The likeliest children of the nodes of a draft pass, or with sampling those that the target likeliest draws."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton, supports_pdl
from windfall.kernels.draw import noise_at

MAX_CHILDREN = 128  # per node, in the kernel


class LazyLogits(NamedTuple):
    """Logits [w, V] that are not computed yet: the operands of their matrix product."""

    hidden: Tensor  # [w, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]

    @property
    def logits(self) -> Tensor:
        return F.linear(*self)


def top_children(
    logits: Tensor | LazyLogits,  # [w, V]
    k: int,
    positions: Tensor | None = None,  # [w] long; needs the next three arguments, each one number on the device
    seed: Tensor | None = None,  # int64
    temperature: Tensor | None = None,  # fp32
    kappa: Tensor | None = None,  # fp32
    tokens: Tensor | None = None,  # [V] long: the token of each column
    offset: int = 0,  # added to `positions`, to get the positions of the drawn tokens
    noise: Tensor | None = None,  # precomputed by `update_noise`
    owners: Tensor | None = None,  # [w] int32: the request of each row; then seed, temperature and kappa are [R]
    cutoff: Tensor | None = None,  # [w] fp32: lower logits are excluded, see `cutoffs`; needs `positions`
    out: tuple[Tensor, Tensor] | None = None,  # contiguous; None: new tensors
) -> tuple[Tensor, Tensor]:
    """The k largest entries of log_softmax(x) in each row, and their tokens → [w, k] fp32, [w, k] long.

    Without `positions`, x is the logits; with them, x is (logits / temperature + noise) / kappa. With `owners`, x is
    the logits where the temperature is 0; otherwise the temperature must be above 0. The lower column wins
    ties, except with more than MAX_CHILDREN children on a GPU, where torch's topk decides. LazyLogits are multiplied
    and searched in one kernel if that is possible and faster; otherwise torch multiplies them.
    """
    if isinstance(logits, LazyLogits):
        noise_known = positions is None or (noise is not None and owners is None and cutoff is None)
        if noise_known and k <= MAX_CHILDREN and on_triton(logits.hidden) and supports_pdl(logits.hidden.device):
            from windfall.kernels.triton.top import fits, top_children_of_product

            if fits(*logits[:2]):
                return top_children_of_product(*logits, k, positions, temperature, kappa, tokens, offset, noise, out)
        logits = logits.logits
    assert 0 < k <= logits.shape[-1] and (cutoff is None or positions is not None)
    given = positions, seed, temperature, kappa, tokens, offset, noise, owners, cutoff
    if on_triton(logits) and k <= MAX_CHILDREN:
        from windfall.kernels.triton.top import top_children as compiled

        return compiled(logits, k, *given, out)
    if on_triton(logits):
        values, order = _scores(logits, *given).topk(k, dim=-1)
        names = order if tokens is None else tokens[order]
    else:
        values, names = reference(logits, k, *given)
    return (values, names) if out is None else (out[0].copy_(values), out[1].copy_(names))


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
    owners: Tensor | None = None,
    cutoff: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`top_children` with torch."""
    scores = _scores(logits, positions, seed, temperature, kappa, tokens, offset, noise, owners, cutoff)
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
    owners: Tensor | None,
    cutoff: Tensor | None,
) -> Tensor:
    """log_softmax(x), [w, V]."""
    scores = logits.float()
    if cutoff is not None:
        scores = scores.masked_fill(logits < cutoff[:, None], -torch.inf)
    if positions is not None:
        assert seed is not None and temperature is not None and kappa is not None
        names = torch.arange(logits.shape[-1], device=logits.device) if tokens is None else tokens
        if owners is not None:
            own = owners.long()
            seed, temperature, kappa = seed[own], temperature[own][:, None], kappa[own][:, None]
        coupled = (scores / temperature + noise_at(seed, positions + offset, names, noise)) / kappa
        scores = coupled if owners is None else torch.where(temperature == 0, scores, coupled)
    return scores.log_softmax(-1)
