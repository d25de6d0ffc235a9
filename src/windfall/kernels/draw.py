"""The target's draw at every row of a pass: the noise of (seed, position, token), never written to memory."""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.kernels.backend import on_triton
from windfall.sampling import GOLDEN, mix, shift


def draw(
    logits: Tensor,  # [n, V]
    positions: Tensor,  # [n] long
    seed: Tensor,  # one int64, see `sampling.signed`
    temperature: Tensor,  # one fp32
    greedy: bool = False,
    offset: int = 0,  # that the draws' positions have over these
) -> Tensor:
    """argmax of logits / temperature + noise, the lower token at ties → [n] long.

    Seed and temperature stay on the device, so that a captured graph serves all of them; at temperature 0 the noise is
    left out, and `greedy` says so in advance.
    """
    if on_triton(logits):
        from windfall.kernels.jit.draw import draw as compiled

        return compiled(logits, positions, seed, temperature, greedy, offset)
    return reference(logits, positions, seed, temperature, greedy, offset)


def reference(
    logits: Tensor, positions: Tensor, seed: Tensor, temperature: Tensor, greedy: bool = False, offset: int = 0
) -> Tensor:
    scores = logits.float()
    if greedy:
        return scores.argmax(-1)
    noise = gumbel(seed, positions + offset, torch.arange(logits.shape[-1], device=logits.device))
    return torch.where(temperature == 0, scores, scores / temperature + noise).argmax(-1)


def gumbel(seed: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """`sampling.gumbel` with the seed on the device: positions [n], tokens [V] → [n, V] fp32."""
    key = mix(mix(seed.reshape(1)) + (positions + 1) * GOLDEN)
    bits = mix(key[:, None] + (tokens + 1) * GOLDEN)
    uniform = (shift(bits, 12).double() + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_().float()
