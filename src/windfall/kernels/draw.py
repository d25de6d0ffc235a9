"""The target's sampled token at every row of a pass, by Gumbel noise that depends only on (seed, position, token)."""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.core.sampling import GOLDEN, mix, shift
from windfall.kernels.backend import on_triton


def draw(
    logits: Tensor,  # [n, V]
    positions: Tensor,  # [n] long
    seed: Tensor,  # one int64, see `sampling.signed`
    temperature: Tensor,  # one fp32
    greedy: bool = False,
    offset: int = 0,  # added to `positions`, to get the positions of the drawn tokens
    noise: Tensor | None = None,  # precomputed by `update_noise`
    owners: Tensor | None = None,  # [n] int32: the request of each row; then seed and temperature are [R]
    cutoff: Tensor | None = None,  # [n] fp32: lower logits are excluded, see `cutoffs`
) -> Tensor:
    """argmax of logits / temperature + noise → [n] long. The lower token wins ties.

    Seed and temperature are device tensors, so one captured graph serves all their values. At temperature 0 no noise
    is added; `greedy` compiles a kernel for this case.
    """
    if on_triton(logits):
        from windfall.kernels.triton.draw import draw as compiled

        return compiled(logits, positions, seed, temperature, greedy, offset, noise, owners, cutoff)
    return reference(logits, positions, seed, temperature, greedy, offset, noise, owners, cutoff)


def reference(
    logits: Tensor,
    positions: Tensor,
    seed: Tensor,
    temperature: Tensor,
    greedy: bool = False,
    offset: int = 0,
    noise: Tensor | None = None,
    owners: Tensor | None = None,
    cutoff: Tensor | None = None,
) -> Tensor:
    """`draw` with torch."""
    scores = logits.float()
    if greedy:
        return scores.argmax(-1)
    if cutoff is not None:
        scores = scores.masked_fill(logits < cutoff[:, None], -torch.inf)
    names = torch.arange(logits.shape[-1], device=logits.device)
    if owners is not None:
        seed, temperature = seed[owners.long()], temperature[owners.long()][:, None]
    drawn = scores / temperature + noise_at(seed, positions + offset, names, noise)
    return torch.where(temperature == 0, scores, drawn).argmax(-1)


def update_noise(
    noise: Tensor,  # [R, V] fp32, written: a ring buffer; row (p % R) belongs to position p
    length: Tensor,  # [1] long: the first position that is needed
    entered: Tensor,  # [1] long: how many of the R positions from there on are new; these are the last ones
    seed: Tensor,  # one int64
) -> None:
    """Compute the noise of new positions. Rows share positions, and reading noise is faster than computing it."""
    if on_triton(noise):
        from windfall.kernels.triton.draw import update_noise as compiled

        compiled(noise, length, entered, seed)
        return
    count, width = noise.shape
    ahead = torch.arange(count, device=noise.device)
    places = (length + ahead) % count
    fresh = gumbel(seed, length + ahead, torch.arange(width, device=noise.device))
    noise.index_copy_(0, places, torch.where((ahead >= count - entered)[:, None], fresh, noise[places]))


def noise_at(seed: Tensor, positions: Tensor, tokens: Tensor, noise: Tensor | None) -> Tensor:
    """`gumbel`, read from `noise` if that is given."""
    return gumbel(seed, positions, tokens) if noise is None else noise[positions % len(noise)][:, tokens]


def gumbel(seed: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """`sampling.gumbel` with the seed [1] or [n] as a device tensor: positions [n], tokens [V] → [n, V] fp32."""
    key = mix(mix(seed.reshape(-1)) + (positions + 1) * GOLDEN)
    bits = mix(key[:, None] + (tokens + 1) * GOLDEN)
    uniform = (shift(bits, 12).double() + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_().float()
