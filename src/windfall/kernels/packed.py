"""Linear layers whose weights stay packed, in bf16, int8 or the blocks of a GGUF file. On a CPU, in float32.

Decoding on a CPU waits for weights to be read from memory, so smaller weights make it faster. The kernel of
`few_rows.py` decodes them as it multiplies. Each row has the same bits in every pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windfall.kernels.cpu.operands import readable, unobserved
from windfall.kernels.few_rows import Kernel

ROWS_PER_PART = 4096  # outputs that are decoded at a time


class PackedLinear(nn.Module):
    """A linear layer of N outputs. `blocks` [N, bytes] uint8 are in the format of this number, as in GGUF files."""

    blocks: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        kernel: Kernel,
        blocks: Tensor,
        format: int,
        inputs: int,
        bias: nn.Parameter | None = None,
        embedding: nn.Embedding | None = None,
    ):
        """`embedding` has the same weights, if the model shares them."""
        super().__init__()
        self.kernel, self.format = kernel, format
        self.in_features, self.out_features = inputs, len(blocks)
        self.register_buffer("blocks", blocks.contiguous())
        self.bias = bias
        self._shared = () if embedding is None else (embedding,)  # a tuple, so that it is no module of this one

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[-1:] != (self.in_features,):
            shape = tuple(input.shape)
            raise RuntimeError(f"this layer takes rows of {self.in_features} numbers, not a tensor of shape {shape}")
        blocks, bias = self.blocks, self.bias
        operands = (input,) if bias is None else (input, bias)
        gradients = torch.is_grad_enabled() and any(each.requires_grad for each in operands)
        if not (readable(*operands) and blocks.is_cpu and unobserved(gradients)):
            weight = self._decoded().to(blocks.device)
            return F.linear(input, weight.to(input.dtype) if input.is_floating_point() else weight, bias)
        found = self.kernel.product(input, blocks, self.format)
        return found if bias is None else found.add_(bias)

    @property
    def shares(self) -> bool:
        """Whether an embedding has the same weights."""
        return bool(self._shared)

    @property
    def format_name(self) -> str:
        import gguf

        return str(gguf.GGMLQuantizationType(self.format).name)

    @property
    def weight(self) -> Tensor:
        """All weights in float32 [N, K]: decoded at each call, unless an embedding has them."""
        return self._shared[0].weight if self._shared else self._decoded()

    def _decoded(self) -> Tensor:
        blocks, parts = self.blocks.cpu(), torch.split(torch.arange(self.out_features), ROWS_PER_PART)
        return torch.cat([self.kernel.take_rows(blocks, rows, self.in_features, self.format) for rows in parts])


def packed_formats(model: nn.Module) -> list[str]:
    """The formats of a model's packed weights, by GGUF's names; empty if none are packed."""
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
