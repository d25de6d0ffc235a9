"""Weights of linear layers as the fused kernels read them: plain tensors, merged where layers have the same input.

Layers without a plain weight, which are quantised or have adapters, compute their products themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from windfall.engine.gpu.forward import Unsupported
from windfall.kernels.few_rows import FewRowsLinear
from windfall.kernels.module_product import ModuleProduct, call, kind_of, steady_sizes, trial_rows
from windfall.kernels.product import Weight


def projection(*modules: Any) -> tuple[Weight, Tensor | None]:
    """The weight and the bias of linear layers of the same input.

    If any of them is not plain, all compute their products themselves, with their biases.
    """
    if all(map(is_plain, modules)):
        return (modules[0].weight, modules[0].bias) if len(modules) == 1 else merge(*modules)
    for module in modules:
        if not (hasattr(module, "in_features") and hasattr(module, "out_features")):
            raise Unsupported(f"its products are not linear layers but {type(module).__name__}")
    return ModuleProduct(modules, modules[0].in_features, sum(module.out_features for module in modules)), None


def module_products(part: object) -> Iterator[ModuleProduct]:
    """All products of a description, or of a part of it, that layers compute themselves."""
    if isinstance(part, ModuleProduct):
        yield part
    elif isinstance(part, tuple | list):
        for each in part:
            yield from module_products(each)


@torch.inference_mode(False)
@torch.no_grad()
def check_products(products: list[ModuleProduct], like: Tensor, exact: bool) -> None:
    """Run the layers; raises Unsupported if they do not fit the model, whose states are like `like`.

    exact: also find out with how many rows they can be called, and require that a row never depends on the others.
    """
    rows = {inputs: trial_rows(inputs, like) for inputs in {product.shape[1] for product in products}}
    for product in products:
        given = rows[product.shape[1]]
        for module in product.modules:
            if (found := call(module, given[:1]).dtype) != like.dtype:
                raise Unsupported(f"its {kind_of(module)} layers return {found}, but the model has {like.dtype}")
        if exact:
            product.sizes = [_steady_sizes(module, given) for module in product.modules]


def _steady_sizes(module: nn.Module, rows: Tensor) -> tuple[int, ...]:
    if sizes := steady_sizes(module, rows):
        return sizes
    raise Unsupported(f"in its {kind_of(module)} layers a row depends on the other rows of a pass")


def is_plain(module: Any) -> bool:
    """Whether this is a plain linear layer: not quantised, without adapters."""
    return type(module) in (nn.Linear, FewRowsLinear) and type(module.weight) is nn.Parameter


def require_plain(*modules: Any) -> None:
    """Raise Unsupported unless all are plain linear layers."""
    for module in modules:
        if not is_plain(module):
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
