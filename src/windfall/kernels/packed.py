"""Linear layers whose weights stay packed, in bf16, int8 or the numbers of a GGUF file. On a CPU, in float32.

Decoding on a CPU waits for weights to be read from memory, so smaller weights make it faster. The kernel of
`few_rows.py` decodes them as it multiplies. Each row has the same bits in every pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windfall.kernels.cpu.operands import readable, unobserved
from windfall.kernels.few_rows import Kernel
from windfall.kernels.panels import Panels


class PackedLinear(nn.Module):
    """A linear layer with a weight in panels. `format_name` is the format in which it was stored."""

    panels: Tensor  # [panels, bytes] uint8
    bias: Tensor | None

    def __init__(
        self,
        kernel: Kernel,
        weight: Panels,
        format_name: str,
        bias: Tensor | None = None,
        embedding: nn.Embedding | None = None,
    ):
        """`embedding` has the same weights, if the model shares them."""
        super().__init__()
        self.kernel, self.format, self.format_name = kernel, weight.format, format_name
        self.in_features, self.out_features = weight.inputs, weight.outputs
        self.register_buffer("panels", weight.bytes.contiguous(), persistent=False)
        self.bias = bias
        self._shared = () if embedding is None else (embedding,)  # a tuple, so that it is no module of this one

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Others see, copy and save an ordinary linear layer, with its weight in float32."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight if keep_vars else self.weight.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        given = state_dict.pop(f"{prefix}weight", None)  # the last of `rest` is the list of errors
        if given is not None and not torch.equal(given.float(), self.weight):
            rest[-1].append(f"{prefix}weight is packed; load the model with full weights to change them")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format_name}"

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1:] != (self.in_features,):
            shape = tuple(input.shape)
            raise RuntimeError(f"this layer takes rows of {self.in_features} numbers, not a tensor of shape {shape}")
        panels, bias = self.panels, self.bias
        operands = (input,) if bias is None else (input, bias)
        gradients = torch.is_grad_enabled() and any(each.requires_grad for each in operands)
        if not (readable(*operands) and panels.is_cpu and unobserved(gradients)):
            weight = self._decoded().to(panels.device)
            return F.linear(input, weight.to(input.dtype) if input.is_floating_point() else weight, bias)
        found = self.kernel.product_of_panels(input, self._packed)
        return found if bias is None else found.add_(bias)

    @property
    def shares(self) -> bool:
        """Whether an embedding has the same weights."""
        return bool(self._shared)

    @property
    def weight(self) -> Tensor:
        """All weights in float32 [N, K]: decoded at each call, unless an embedding has them."""
        return self._shared[0].weight if self._shared else self._decoded()

    @property
    def _packed(self) -> Panels:
        return Panels(self.panels, self.format, self.out_features, self.in_features)

    def _decoded(self) -> Tensor:
        return self.kernel.unpack(self._packed._replace(bytes=self.panels.cpu()))


def packed_formats(model: nn.Module) -> list[str]:
    """The formats of a model's packed weights, by name; empty if none are packed."""
    return sorted({layer.format_name for layer in model.modules() if isinstance(layer, PackedLinear)})


def weights_of(model: nn.Module) -> Iterator[Tensor]:
    """What `model.parameters()` yields, packed weights decoded."""
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, PackedLinear) and not module.shares:
            yield module.weight
        for weight in module.parameters(recurse=False):
            if weight not in seen:
                seen.add(weight)
                yield weight
