"""The target's draw at every row of a pass, and the noise of (seed, position, token) that it is made of."""

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
    offset: int = 0,  # that the draws' positions have over these
    noise: Tensor | None = None,  # what `roll` made, where it has been
) -> Tensor:
    """argmax of logits / temperature + noise, the lower token at ties → [n] long.

    Seed and temperature stay on the device, so that a captured graph serves all of them; at temperature 0 the noise is
    left out, and `greedy` says so in advance.
    """
    if on_triton(logits):
        from windfall.kernels.triton.draw import draw as compiled

        return compiled(logits, positions, seed, temperature, greedy, offset, noise)
    return reference(logits, positions, seed, temperature, greedy, offset, noise)


def reference(
    logits: Tensor,
    positions: Tensor,
    seed: Tensor,
    temperature: Tensor,
    greedy: bool = False,
    offset: int = 0,
    noise: Tensor | None = None,
) -> Tensor:
    scores = logits.float()
    if greedy:
        return scores.argmax(-1)
    names = torch.arange(logits.shape[-1], device=logits.device)
    drawn = scores / temperature + noise_at(seed, positions + offset, names, noise)
    return torch.where(temperature == 0, scores, drawn).argmax(-1)


def roll(
    noise: Tensor,  # [R, V] fp32, written: that of each position, by position modulo R
    length: Tensor,  # [1] long: the first position that matters
    entered: Tensor,  # [1] long: how many of the R from there on are not there yet, the last ones
    seed: Tensor,  # one int64
) -> None:
    """Bring the noise up to date. Its logarithms take longer than reading it, and several rows have one position."""
    if on_triton(noise):
        from windfall.kernels.triton.draw import roll as compiled

        compiled(noise, length, entered, seed)
        return
    count, width = noise.shape
    ahead = torch.arange(count, device=noise.device)
    places = (length + ahead) % count
    fresh = gumbel(seed, length + ahead, torch.arange(width, device=noise.device))
    noise.index_copy_(0, places, torch.where((ahead >= count - entered)[:, None], fresh, noise[places]))


def noise_at(seed: Tensor, positions: Tensor, tokens: Tensor, noise: Tensor | None) -> Tensor:
    """`gumbel`, looked up where `roll` has made it."""
    return gumbel(seed, positions, tokens) if noise is None else noise[positions % len(noise)][:, tokens]


def gumbel(seed: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """`sampling.gumbel` with the seed on the device: positions [n], tokens [V] → [n, V] fp32."""
    key = mix(mix(seed.reshape(1)) + (positions + 1) * GOLDEN)
    bits = mix(key[:, None] + (tokens + 1) * GOLDEN)
    uniform = (shift(bits, 12).double() + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_().float()
