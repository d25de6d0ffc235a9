"""The first layer of an EAGLE-3 head in C computes what torch computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from helpers.cpu_kernel import use_compiled
from windfall.checkpoints.find import cache_dir
from windfall.drafters.head_drafter import HeadMemory
from windfall.heads import cpu_layers
from windfall.heads.base import HeadConfig
from windfall.heads.cpu_layers import CpuConcatLayer, use_cpu_layers
from windfall.heads.eagle3 import ConcatLayer
from windfall.heads.layers import Rotary
from windfall.kernels.cpu_layers import LayerKernels, prepare_layer_kernels
from windfall.kernels.packed import PackedLinear
from windfall.kernels.panels import rounded

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 60,
}


def layer(flags: dict[str, bool], **changes: Any) -> ConcatLayer:
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, **changes})
    config.qk_norm = flags.pop("qk_norm", False)
    made = ConcatLayer(HeadConfig("eagle3", config, 64, (1,), 60, flags=flags))
    for parameter in made.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return made.requires_grad_(False).eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of the kernel that computed something."""
    use_compiled()
    prepare_layer_kernels(cache_dir() / "kernels")
    seen: list[int] = []
    own = LayerKernels.concat_layer

    def concat_layer(self: LayerKernels, *given: Any) -> Any:
        found = own(self, *given)
        seen.extend([] if found is None else [found.shape[1]])
        return found

    monkeypatch.setattr(LayerKernels, "concat_layer", concat_layer)
    return seen


def passes(made: ConcatLayer, rotary: Rotary, batch: int, windows: tuple[int | None, ...]) -> torch.Tensor:
    """The layer's outputs in three passes; the second and the third see a part of the rows before."""
    chance, memory, found, length = torch.Generator().manual_seed(1), HeadMemory(1, batch, windows), [], 0
    for rows in (5, 1, 6):
        embedded, hidden = (torch.randn(batch, rows, 64, generator=chance) for _ in range(2))
        memory.cache.reserve(rows)
        memory.mask = None
        if rows > 1:
            memory.mask = torch.rand(batch, rows, length + rows, generator=chance) > 0.4
            memory.mask |= torch.eye(rows, length + rows, dtype=torch.bool).roll(length, 1)
        positions = torch.arange(length, length + rows).expand(batch, -1)
        found.append(made(embedded, hidden, rotary(positions, torch.float32), memory))
        memory.cache.staged += rows
        length += rows
    return torch.cat(found, 1)


@torch.inference_mode()
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ({}, {}),
        ({"norm_before_residual": True}, {"attention_bias": True, "mlp_bias": True}),
        ({"qk_norm": True}, {"num_key_value_heads": 4, "head_dim": 32}),
    ],
)
def test_passes_are_those_of_torch(
    calls: list[int], flags: dict[str, bool], changes: dict[str, Any], packed: bool, batch: int
) -> None:
    plain = layer(dict(flags), **changes)
    if packed:
        kernel = use_compiled()
        for name, linear in [*plain.named_modules()]:
            if type(linear) is nn.Linear:
                plain.set_submodule(name, PackedLinear(kernel, rounded(linear.weight), "int8", linear.bias))
    rotary, swapped = Rotary(LlamaConfig(**{**SIZES, **changes})), copy.deepcopy(plain)
    use_cpu_layers(swapped)
    assert isinstance(swapped, CpuConcatLayer)
    torch.testing.assert_close(
        passes(swapped, rotary, batch, ()), passes(plain, rotary, batch, ()), rtol=1e-4, atol=5e-4
    )
    assert calls == [5, 1, 6]
    assert type(copy.deepcopy(swapped)) is ConcatLayer


@torch.inference_mode()
@pytest.mark.parametrize("changes", [{"head_dim": 8}, {"hidden_act": "gelu"}])
def test_layers_that_do_not_fit_are_left_alone(calls: list[int], changes: dict[str, Any]) -> None:
    made = layer({}, **changes)
    use_cpu_layers(made)
    assert type(made) is ConcatLayer and not calls


def test_other_uses_are_left_to_torch(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, rotary = layer({}), Rotary(LlamaConfig(**SIZES))
    swapped = copy.deepcopy(plain)
    use_cpu_layers(swapped)
    torch.testing.assert_close(passes(swapped, rotary, 1, ()), passes(plain, rotary, 1, ()))  # gradients are possible
    with torch.inference_mode():
        monkeypatch.setattr(cpu_layers, "MOST_ROWS", 0)
        torch.testing.assert_close(passes(swapped, rotary, 1, ()), passes(plain, rotary, 1, ()))
    assert not calls


@torch.inference_mode()
def test_tensors_that_move_are_seen(calls: list[int]) -> None:
    plain, rotary = layer({}), Rotary(LlamaConfig(**SIZES))
    swapped = copy.deepcopy(plain)
    use_cpu_layers(swapped)
    swapped.bfloat16().float()  # as a second engine does that shares the head
    plain.bfloat16().float()
    torch.testing.assert_close(passes(swapped, rotary, 1, ()), passes(plain, rotary, 1, ()))
    assert not calls
