"""The convolution of DFlash 2: each row of a block is mixed with the rows before it.

y[k] = sum over i of x[k - i] * (base[i] + delta[i]), where delta is a linear function of row k, one number for each
group of channels. It runs on the input and on the output of a sub-layer; one projection gives the deltas of both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class BlockConv(nn.Module):
    """A new one changes nothing."""

    def __init__(self, width: int, taps: int, group: int):
        super().__init__()
        self.taps, self.group = taps, group
        base = torch.zeros(2, taps, width)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)  # [input or output, taps, H]
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows [.., gamma, H] of whole blocks through the convolution, the layer, and the convolution again."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))  # [.., gamma, 2, taps, groups]
        before, after = delta.unbind(-3)
        return self._mix(layer(self._mix(x, before, self.base_kernel[0])), after, self.base_kernel[1])

    def _mix(self, x: Tensor, delta: Tensor, base: Tensor) -> Tensor:
        kernel = base.to(x.dtype) + delta.repeat_interleave(self.group, -1)  # [.., gamma, taps, H]
        mixed = x * kernel[..., 0, :]
        for tap in range(1, min(self.taps, x.shape[-2])):
            earlier = torch.cat([torch.zeros_like(x[..., :tap, :]), x[..., :-tap, :]], -2)
            mixed = mixed + earlier * kernel[..., tap, :]
        return mixed
