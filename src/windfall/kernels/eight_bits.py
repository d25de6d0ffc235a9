"""Weights in int8, with a scale for each output.

They have half as many bytes as in half precision, and reading them takes most of the time of a pass over few rows. Only
drafters use them: their precision changes which tokens are drafted, but never the text.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.kernels.backend import on_triton, supports_pdl

LARGEST_INT8 = 127
INT8_UNIT = 128  # elements of K; see kernels/triton/int8_product.py
ROWS_PER_PART = 4096  # that are rounded at a time
MAX_ROWS = 128  # with more, arithmetic takes most of the time
MIN_NUMBERS = 2**22  # of a weight: 8 MB in half precision, which a fast GPU reads in 2 microseconds


class EightBitWeight:
    """The rounded form of a weight [N, K], and the product with it."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.full = weight.detach()  # for passes over many rows
        self.values, scales = round_rows(self.full)  # int8
        self.scales = scales[:, 0]
        self.bias = None if bias is None else bias.detach()
        self.shape = weight.shape

    def __len__(self) -> int:
        return len(self.values)

    def __call__(self, x: Tensor, exact: bool = False) -> Tensor:
        """[n, K] → [n, N], with the bias. `exact` changes nothing."""
        if on_triton(x):
            from windfall.kernels.triton import int8_product, matmul

            if len(x) > MAX_ROWS:
                return F.linear(x, self.full, self.bias)
            if int8_product.supported(x, self.values):
                return int8_product.int8_product(x, self.values, self.scales, self.bias)
            if matmul.supported(x, self.values):
                return matmul.matmul(x, self.values, self.bias, scales=self.scales)
        made = F.linear(x, self.values.to(x.dtype)).float() * self.scales
        return (made if self.bias is None else made + self.bias).to(x.dtype)


def round_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[n, K] → int8 [n, K] and the scale of each row, fp32 [n, 1]. A part of the rows is rounded at a time."""
    parts = []
    for part in torch.split(rows, ROWS_PER_PART):
        wide = part.float()
        scales = row_scales(wide)
        parts.append(((wide / scales).round_().to(torch.int8), scales))
    whole, all_scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return whole, all_scales


def row_scales(rows: Tensor) -> Tensor:
    """[n, K] → [n, 1], the value of one int8 unit in each row."""
    return rows.abs().amax(1, keepdim=True).clamp_(min=1e-20).div_(LARGEST_INT8)


def pays(weight: Tensor, wanted: bool | None) -> bool:
    """Whether this weight should be read in int8: it must be large. `wanted` None: only where windfall has a product of
    int8 with int8."""
    if wanted is None:
        wanted = supports_pdl(weight.device) and weight.shape[1] % INT8_UNIT == 0
    return wanted and weight.numel() >= MIN_NUMBERS
