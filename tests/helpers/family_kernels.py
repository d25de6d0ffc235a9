"""Checks of the norms, rotations and activations in which families of models differ, against transformers' modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_cohere
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_glm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb as rotate_olmo2

from helpers.kernels import assert_same, make_cache
from windfall.kernels import add_norm, rotate_and_store
from windfall.kernels.norm import activate
from windfall.kernels.norm_kinds import Activation, HeadNorms, NormKind, NormStyle, Rotation

ROTATIONS: dict[str, tuple[Rotation, Callable[..., tuple[Tensor, Tensor]]]] = {
    "cohere": (Rotation(adjacent=True, wide=True), rotate_cohere),
    "glm": (Rotation(adjacent=True), rotate_glm),
    "olmo2": (Rotation(wide=True), rotate_olmo2),
}


def ulp_of(dtype: torch.dtype) -> float:
    """The relative difference of neighbouring numbers, with some room in fp32."""
    return 3e-6 if dtype == torch.float32 else 2**-7


@torch.no_grad()
def check_norm_styles(n: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Norms with biases, factors of the added rows, sums without a norm, and norms of the residual alone."""
    torch.manual_seed(n)
    x, residual = torch.randn(2, n, width, device=device).to(dtype)
    norm = torch.nn.LayerNorm(width, 1e-5).to(device, dtype)
    for each in (norm.weight, norm.bias):
        torch.nn.init.normal_(each)
    how = NormStyle(NormKind.CENTRED, norm.bias)
    ulp = ulp_of(dtype)
    for style, scale in ((how, 1.0), (how._replace(before=0.22), 0.22), (how._replace(parallel=True), 1.0)):
        normed, total = add_norm(x, residual, norm.weight, 1e-5, style=style)
        torch.testing.assert_close(total, residual + x * scale, atol=1e-6, rtol=ulp)
        torch.testing.assert_close(normed, norm(residual if style.parallel else total), atol=8 * ulp, rtol=ulp)
        alone = add_norm(x[-1:], residual[-1:], norm.weight, 1e-5, style=style)
        assert_same(torch.cat(alone), torch.cat([normed[-1:], total[-1:]]), 1e-6)
        same, other = add_norm(x, residual, None, 1e-5, style=style._replace(parallel=False))
        assert torch.equal(same, total) and torch.equal(other, total)
    assert all(each is x for each in add_norm(x, None, None, 1e-5))
    torch.testing.assert_close(add_norm(x, None, norm.weight, 1e-5, style=how)[0], norm(x), atol=8 * ulp, rtol=ulp)


def check_activations(n: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """The activations of MLPs without a gate."""
    torch.manual_seed(n)
    x = 3 * torch.randn(n, width, device=device).to(dtype)
    x[0, :4] = torch.tensor([0.0, torch.nan, -40.0, 40.0], device=device)
    for activation, name in ((Activation.GELU, "gelu_pytorch_tanh"), (Activation.RELU_SQUARED, "relu2")):
        wanted, made = ACT2FN[name](x), activate(x.clone(), activation)
        torch.testing.assert_close(made, wanted, atol=1e-5, rtol=ulp_of(dtype), equal_nan=True)
        assert torch.equal(activate(x[-1:].clone(), activation).isnan(), made[-1:].isnan())


@torch.no_grad()
def check_rotations(
    name: str,
    n: int,
    heads: int,
    shared: int,
    width: int,
    rotated: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Against transformers' function; with norms of heads first, and a row alone gives the same."""
    torch.manual_seed(n)
    rotation, rotate = ROTATIONS[name]
    qkv = torch.randn(n, (heads + 2 * shared) * width, device=device).to(dtype)
    half = torch.randn(2, n, rotated // 2, device=device).to(torch.float32 if name == "olmo2" else dtype)
    cos, sin = torch.cat([half, half], -1)
    given = half.repeat_interleave(2, -1) if name == "cohere" else torch.cat([half, half], -1)
    for norms in (None, *head_norms(heads, shared, width, dtype, device)):
        rows = qkv.unflatten(1, (-1, width))
        parts = rows if norms is None else normed_heads(rows, heads, shared, norms)
        turned: Any = (parts.transpose(0, 1)[None, :heads], parts.transpose(0, 1)[None, heads : heads + shared])
        if rotated:
            turned = rotate(*turned, *given[:, None])
        keys, values = make_cache(shared, n + 5, width, 0, dtype, device)
        slots = torch.randperm(n + 5, device=device)[:n]
        how: dict[str, Any] = {"norms": norms, "rotation": rotation}
        made = rotate_and_store(qkv, cos, sin, keys, values, slots, **how)
        close = {"atol": 1e-5 if dtype == torch.float32 else 0.03, "rtol": ulp_of(dtype)}
        torch.testing.assert_close(made, turned[0][0].transpose(0, 1), **close)
        torch.testing.assert_close(keys[:, slots], turned[1][0], **close)
        assert torch.equal(values[:, slots].transpose(0, 1), rows[:, heads + shared :])
        if norms is None:
            assert torch.equal(made, turned[0][0].transpose(0, 1)) and torch.equal(keys[:, slots], turned[1][0])
        alone = rotate_and_store(qkv[-1:], cos[-1:], sin[-1:], keys, values, slots[-1:], **how)
        assert_same(alone, made[-1:], 1e-6)


def head_norms(heads: int, shared: int, width: int, dtype: torch.dtype, device: str) -> list[HeadNorms]:
    """Weights that all heads share, weights of their own, and norms over all heads together."""
    own = [torch.randn(size * width, device=device).to(dtype) for size in (heads, shared)]
    return [
        HeadNorms(own[0][:width], own[1][:width], 1e-6),
        HeadNorms(*own, 1e-5, NormKind.CENTRED),
        HeadNorms(*own, 1e-6, NormKind.WIDE, joint=True),
    ]


def normed_heads(rows: Tensor, heads: int, shared: int, norms: HeadNorms) -> Tensor:
    """Heads [n, heads + 2 * shared, d] of which queries and keys are normalised by transformers' modules."""
    parts, width = [*rows.split([heads, shared, shared], 1)], rows.shape[2]
    for place, weight in enumerate((norms.queries, norms.keys)):
        if norms.joint:
            module: Any = Olmo2RMSNorm(len(weight), norms.eps)
        elif norms.kind is NormKind.CENTRED:
            weight, module = weight.view(-1, width), CohereLayerNorm((len(weight) // width, width), norms.eps)
        else:
            module = LlamaRMSNorm(width, norms.eps)
        module.weight = torch.nn.Parameter(weight)
        given = parts[place]
        parts[place] = (module(given.flatten(1)) if norms.joint else module(given)).view_as(given)
    return torch.cat(parts, 1)
