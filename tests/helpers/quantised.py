"""Linear layers that compute their own products, as those of quantisation libraries do, and models made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from helpers.tiny import tiny


class OwnLinear(nn.Module):
    """A layer with 8 bits for each weight and a scale for each output. Sums in float64 hide their order."""

    def __init__(self, plain: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        scales = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scales", scales)
        self.register_buffer("weight", (plain.weight.detach() / scales).round().to(torch.int8))
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        made = nn.functional.linear(x.double(), self.weight * self.scales.double()).to(x.dtype)
        return made if self.bias is None else made + self.bias


class OneScaleLinear(OwnLinear):
    """Quantises its input, too, with one scale for all rows."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max() / 127
        return super().forward((x / scale).round() * scale)


class OutlierLinear(OwnLinear):
    """Quantises its input with a scale for each row, except for columns in which any row is large."""

    def forward(self, x: Tensor) -> Tensor:
        large = (x.abs() > 6).flatten(0, -2).any(0)
        small = x.masked_fill(large, 0)
        scale = small.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return super().forward(torch.where(large, x, (small / scale).round() * scale))


class CountingLinear(OwnLinear):
    """Uses other kernels for a single row and for more than 200 rows."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[:-1].numel()
        return super().forward(x * 1.0625) / 1.0625 if rows == 1 or rows > 200 else super().forward(x)


class PlaceLinear(OwnLinear):
    """Rounds the rows of the second half of a pass in another way."""

    def forward(self, x: Tensor) -> Tensor:
        made, half = super().forward(x), x.shape[-2] // 2
        return torch.cat([made[..., :half, :], super().forward(x[..., half:, :] * 1.0625) / 1.0625], -2)


class WideLinear(OwnLinear):
    """Returns float32 for any input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class OneScaleSubclass(nn.Linear):
    """An `nn.Linear` that quantises its input, with one scale for all rows."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max() / 127
        return super().forward((x / scale).round() * scale)


def subclassed(plain: nn.Linear) -> nn.Linear:
    """This layer as a `OneScaleSubclass`."""
    plain.__class__ = OneScaleSubclass
    return plain


def quantise(model: Any, kind: Callable[[nn.Linear], nn.Module] = OwnLinear, *names: str) -> Any:
    """Replace the linear layers with these names, or all in the model's layers, by layers of this kind."""
    for part in model.model.layers.modules():
        for name, child in list(part.named_children()):
            if type(child) is nn.Linear and (not names or name in names):
                setattr(part, name, kind(child))
    return model


def quantised(
    kind: Callable[[nn.Linear], nn.Module] = OwnLinear,
    *names: str,
    dtype: torch.dtype = torch.bfloat16,
    num_hidden_layers: int = 2,
    **how: Any,
) -> Any:
    """A tiny model whose linear layers are of this kind."""
    return quantise(tiny(dtype=dtype, num_hidden_layers=num_hidden_layers, **how), kind, *names)
