"""Weights of linear layers as the fused kernels read them: plain tensors, merged where layers have the same input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from windfall.engine.gpu.forward import Unsupported
from windfall.kernels.few_rows import FewRowsLinear


def require_plain(*modules: Any) -> None:
    """Raise Unsupported unless all are plain linear layers: not quantised, without adapters."""
    for module in modules:
        if type(module) not in (nn.Linear, FewRowsLinear) or type(module.weight) is not nn.Parameter:
            raise Unsupported(f"its products are not plain linear layers but {type(module).__name__}")


def require_plain_parameters(name: str, *modules: nn.Module) -> None:
    """Raise Unsupported unless all parameters of these modules are plain tensors: not quantised, without adapters.

    Modules inside them have no state: they are activations.
    """
    for module in modules:
        adapted = any(child.state_dict() for child in module.children())
        packed = any(parameter.dtype.itemsize < 2 for parameter in module.parameters())
        if adapted or packed or {*map(type, module.parameters())} != {nn.Parameter}:
            raise Unsupported(f"{name} are not plain but {type(module).__name__}")


def merge(*modules: Any) -> tuple[Tensor, Tensor | None]:
    """One weight and one bias for several linear layers of the same input.

    The layers' own parameters become views of them. Memory is not doubled, and in-place updates are seen.
    """
    require_plain(*modules)
    biases = [module.bias for module in modules]
    return _merged([module.weight for module in modules]), None if biases[0] is None else _merged(biases)


@torch.inference_mode(False)
@torch.no_grad()
def _merged(parts: list[Tensor]) -> Tensor:
    """A tensor that these parameters are consecutive views of; they become views if they are not."""
    whole = _common_storage(parts)
    if whole is None:
        whole = torch.cat([part.detach() for part in parts])
        at = 0
        for part in parts:
            part.data, at = whole[at : at + len(part)], at + len(part)
    return whole


def _common_storage(parts: list[Tensor]) -> Tensor | None:
    """The tensor that these are consecutive views of; None if they are not."""
    first = parts[0]
    at, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for part in parts:
        adjacent = part.untyped_storage().data_ptr() == storage and part.storage_offset() == at
        if not adjacent or not part.is_contiguous():
            return None
        at += part.numel()
    size = (sum(map(len, parts)), *first.shape[1:])
    return first.detach().as_strided(size, first.stride(), first.storage_offset())
