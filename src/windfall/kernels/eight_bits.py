"""Weights in int8, with a scale for each output. They have half as many bytes as in half precision, and reading them
takes most of the time of a pass over few rows.

Only drafters use them. Their precision changes which tokens are drafted, but never the text.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton

LARGEST = 127
ROWS_PER_PART = 4096  # that are rounded at a time
MIN_NUMBERS = 2**22  # smaller weights are read in less time than a launch takes


class EightBitWeight:
    """The rounded form of a weight [N, K], and the product with it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        parts = [rounded(part) for part in torch.split(weight.detach(), ROWS_PER_PART)]
        self.values, self.scales = (torch.cat(each) for each in zip(*parts, strict=True))  # [N, K] int8, [N] fp32
        self.bias = None if bias is None else bias.detach()
        self.shape = weight.shape

    def __len__(self) -> int:
        return len(self.values)

    def __call__(self, x: Tensor, exact: bool = False) -> Tensor:
        """[n, K] → [n, N], with the bias."""
        if on_triton(x):
            from windfall.kernels.triton.matmul import matmul, supported

            if supported(x, self.values):
                return matmul(x, self.values, self.bias, scales=self.scales)
        made = F.linear(x, self.values.to(x.dtype)).float() * self.scales
        return (made if self.bias is None else made + self.bias).to(x.dtype)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[n, K] → int8 [n, K] and the scale of each row [n]."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_(min=1e-20).div_(LARGEST)
    return (wide / scales[:, None]).round_().to(torch.int8), scales


def pays(weight: Tensor) -> bool:
    """Whether this weight is large enough to be read faster in int8."""
    return weight.numel() >= MIN_NUMBERS
