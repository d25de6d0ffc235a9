"""Exact passes: a row of a tree is rounded as plain decoding rounds it, in half precision too.

On a CPU the rounding of a matrix product may depend on a row's place. So here products are replaced by sums in a fixed
order; tests/gpu checks the same with the products of a GPU.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.exact import POLICIES, check_rows, check_texts
from helpers.fused import MODELS
from helpers.fused import model as family_model
from helpers.random_heads import random_head
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.errors import InexactWarning
from windfall.core.types import GpuOptions
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.engine.gpu.forward import Unsupported
from windfall.engine.profiling import describe
from windfall.model.target import Target


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    made = (x[:, None].float() * weight.float()).sum(-1).to(x.dtype)
    return made if bias is None else made + bias


@pytest.fixture(autouse=True)
def steady_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.kernels.product.F", SimpleNamespace(linear=product))
    monkeypatch.setattr("windfall.kernels.experts.F", SimpleNamespace(linear=product, silu=torch.nn.functional.silu))


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


@pytest.mark.parametrize("name", [*MODELS][1:])
def test_rows_of_other_families_are_those_of_plain_decoding(name: str) -> None:
    check_rows(family_model(name, torch.bfloat16), 40, 20)


@pytest.mark.parametrize(("policy", "length"), list(zip(POLICIES, (60, 250, 60, 250), strict=True)))
def test_texts_are_those_of_plain_decoding(policy: str, length: int) -> None:
    assert check_texts(model(), policy, None, (length,), 16) > 1.5


def test_sampled_texts_with_a_head_are_those_of_plain_decoding() -> None:
    head = FeatureHeadDrafter(random_head().to(torch.bfloat16))
    check_texts(model(), "beam", head, (60,), 12, temperature=1.0, top_p=0.9, seed=5)


# ---- models without exact passes


def warned(made: Engine) -> list[str]:
    """The warnings while an engine generates two texts, the second after a change of the model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            made.generate(prompt(), max_new_tokens=4)
            made.target.model.base_model.register_forward_hook(lambda *_: None)
    return [str(each.message) for each in caught if issubclass(each.category, InexactWarning)]


def on_buffers(family: str, dtype: torch.dtype, **options: Any) -> Engine:
    target = Target(tiny(family, dtype=dtype), name=family)
    return Engine(target, LMDrafter(), registry.policy("beam"), gpu_options=GpuOptions(**{"graphs": True, **options}))


@pytest.mark.parametrize("missing", ["exact_forward", "fastest_forward"])  # without either there is no GPU runner
@pytest.mark.parametrize("options", [{}, {"exact": True}])
def test_an_engine_without_exact_passes_says_so_once(
    missing: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*given: Any) -> Any:
        raise Unsupported("its layers are odd")

    for name in {"exact_forward", missing}:
        monkeypatch.setattr(f"windfall.engine.gpu.target.{name}", unsupported)
    made = on_buffers("llama", torch.bfloat16, **options)
    assert warned(made) == [
        "the text of llama in bfloat16 may differ from plain decoding's where two tokens are almost equally likely, "
        "because this model does not run in exact passes (its layers are odd); `windfall audit` counts the "
        "differences, and float32 avoids them"
    ]
    assert (made.gpu_runner is None) is (missing == "fastest_forward")
    assert not made.exact_passes and not describe(made)["target"]["exact"]


def test_the_warning_names_what_the_model_lacks() -> None:
    [about] = warned(on_buffers("gpt-neox", torch.float16))
    assert "the text of gpt-neox in float16" in about and "GPTNeoXForCausalLM" in about


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("gpt-neox", torch.float32, {}),
        ("gpt-neox", torch.float64, {}),
        ("gpt-neox", torch.bfloat16, {"exact": False}),
        ("gpt-neox", torch.bfloat16, {"graphs": None}),  # not on a GPU
        ("llama", torch.bfloat16, {"exact": False}),
    ],
)
def test_other_engines_without_exact_passes_say_nothing(
    family: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    made = on_buffers(family, dtype, **options)
    assert warned(made) == []
    assert not made.exact_passes and not describe(made)["target"]["exact"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_passes_are_exact_by_default(dtype: torch.dtype) -> None:
    made = on_buffers("llama", dtype)
    assert made.exact_passes and describe(made)["target"]["exact"]
    [about] = warned(made) or [""]  # the hook of the second text makes this model unsupported
    assert (made.exact_passes, "hooks" in about) == (False, dtype == torch.float16)
