"""Draft with the target itself, without some of its layers.

After Draft & Verify (Zhang et al. 2023) and LayerSkip (Elhoushi et al. 2024). The weights are shared; only a KV cache
is added.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from windfall.core.options import option, parse_ranges
from windfall.core.types import InputError
from windfall.drafters.lm import LMDrafter
from windfall.model.target import Target


@dataclass
class SelfDrafter(LMDrafter):
    """The target's own weights without some layers."""

    model: Any = None
    trust_remote_code: bool = False
    skip: str = option(
        "middle", "layers to skip: 'middle' (a sixth of them, after the middle), or numbers such as '3,5,10-20'"
    )

    def attach(self, target: Target) -> None:
        count = target.decoder.config.num_hidden_layers
        self._serve(without_layers(target.model, parse_layers(self.skip, count)), target)


def parse_layers(text: str, count: int) -> list[int]:
    """'middle' or '3,5,10-20' → layer numbers below `count`."""
    if text == "middle":  # where skipping hurts a model without early-exit training least
        return list(range(count // 2, count // 2 + max(1, count // 6)))
    try:
        layers = parse_ranges(text)
    except ValueError:
        raise InputError(f"skip takes 'middle' or layer numbers such as '3,5,10-20', not '{text}'") from None
    if unknown := layers - set(range(count)):
        raise InputError(f"skip: there is no layer {min(unknown)}; the model has the layers 0-{count - 1}")
    if len(layers) == count:
        raise InputError(f"skip must leave at least one of the layers 0-{count - 1}, not '{text}'")
    return sorted(layers)


def without_layers(model: Any, skip: list[int]) -> Any:
    """The model with the other layers only: modules are shared, the list of layers is new."""
    config = model.config.get_text_config()
    if getattr(config, "cross_attention_layers", None):
        raise InputError(
            f"{type(model).__name__} finds its cross-attention layers by number; the self drafter cannot skip any"
        )
    count = config.num_hidden_layers
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise InputError(f"{type(model).__name__}: cannot find its list of {count} layers; the self drafter needs it")
    kept = [i for i in range(count) if i not in skip]
    return _replace(model, min(lists, key=len).split("."), kept)


def _replace(module: Any, path: list[str], kept: list[int]) -> Any:
    """Copy only the modules on the path to the list of layers."""
    if not path:
        return nn.ModuleList(module[i] for i in kept)
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin._modules[path[0]] = _replace(module._modules[path[0]], path[1:], kept)
    if getattr(twin.config, "layer_types", None):  # models that look up the kinds of layers by index
        twin.config = copy.copy(twin.config)
        twin.config.layer_types = [module.config.layer_types[i] for i in kept]
    return twin
