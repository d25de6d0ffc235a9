"""Exact passes: a row of a tree is rounded as plain decoding rounds it, in half precision too.

On a CPU the rounding of a matrix product may depend on a row's place. So here products are replaced by sums in a fixed
order; tests/gpu checks the same with the products of a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.exact import POLICIES, check_rows, check_texts
from helpers.fused import model as family_model
from helpers.random_heads import random_head
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import GpuOptions, InputError
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    made = (x[:, None].float() * weight.float()).sum(-1).to(x.dtype)
    return made if bias is None else made + bias


@pytest.fixture(autouse=True)
def steady_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.kernels.product.F", SimpleNamespace(linear=product))


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model whose attention is spread over the whole text, so that every sum has many terms."""
    made = tiny(dtype=dtype, max_position_embeddings=1024)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.q_proj.weight.div_(30)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])  # fp32 shows every rounding
@pytest.mark.parametrize(("length", "size"), [(9, 12), (62, 64), (255, 20), (254, 100)])
def test_rows_of_a_tree_are_those_of_plain_decoding(length: int, size: int, dtype: torch.dtype) -> None:
    check_rows(model(dtype), length, size)


@pytest.mark.parametrize("name", ["mistral", "qwen3, mixed", "phi3, partly rotated", "gemma2", "gemma3"])
def test_rows_of_other_families_are_those_of_plain_decoding(name: str) -> None:
    check_rows(family_model(name, torch.bfloat16), 40, 20)


@pytest.mark.parametrize(("policy", "length"), list(zip(POLICIES, (60, 250, 60, 250), strict=True)))
def test_texts_are_those_of_plain_decoding(policy: str, length: int) -> None:
    assert check_texts(model(), policy, None, (length,), 16) > 1.5


def test_sampled_texts_with_a_head_are_those_of_plain_decoding() -> None:
    head = FeatureHeadDrafter(random_head().to(torch.bfloat16))
    check_texts(model(), "beam", head, (60,), 12, temperature=1.0, top_p=0.9, seed=5)


def test_exact_passes_are_refused_for_other_models() -> None:
    made = Engine(
        Target(tiny("gpt-neox")), LMDrafter(), registry.policy("beam"), gpu_options=GpuOptions(True, exact=True)
    )
    for _ in range(2):  # the second time too
        with pytest.raises(
            InputError, match="exact passes need the fused forward: there is no fused forward for GPTNeoX"
        ):
            made.generate(prompt(), max_new_tokens=4)
