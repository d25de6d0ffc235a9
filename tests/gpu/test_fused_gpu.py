"""The fused forward on a CUDA device, for every family: logits, CUDA graphs, and exact passes in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.exact import check_rows, check_texts
from helpers.fused import MODELS, logits_of, model, phi4_mini
from helpers.tiny import prompt
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.kernels.backend import triton_installed
from windfall.model.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not triton_installed(), reason="no CUDA device or no Triton"),
]
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}

MIXTURES = {"gpt-oss", "qwen3-moe", "mixtral", "olmoe", "mellum"}


def wide(name: str, dtype: torch.dtype) -> Any:
    """A model whose products are large enough for the kernels."""
    width = WIDE["hidden_size"] // WIDE["num_attention_heads"]  # of a head, where a family has no other
    changes = {**WIDE, "head_dim": width} if name.startswith(("phi", "olmoe", "helium")) else WIDE
    if name == "phi4-mini":
        changes = {**changes, **phi4_mini(width)}
    return model(name, dtype, "cuda", **({"text_config": changes} if "images" in name else changes))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("exact", [False, True])
def test_logits_are_those_of_transformers(name: str, exact: bool) -> None:
    found, wanted = logits_of(wide(name, torch.float32), 150, 24, exact)
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_bf16_are_near_those_of_transformers(name: str) -> None:
    """Both round after every operation, but sum in different orders; a router may then choose other experts."""
    found, wanted = (each.float() for each in logits_of(wide(name, torch.bfloat16), 150, 24))
    assert (found - wanted).abs().mean() < (0.15 if name in MIXTURES else 0.04) * wanted.std()


@pytest.mark.parametrize("name", MODELS)
def test_exact_rows_and_texts_are_those_of_plain_decoding(name: str) -> None:
    made = wide(name, torch.bfloat16)
    check_rows(made, 150, 24)
    assert check_texts(made, "beam", None, (60,), 48) > 1.5


@pytest.mark.parametrize("name", MODELS)
def test_texts_run_in_graphs(name: str) -> None:
    made = wide(name, torch.float32)
    host, device = (
        Engine(Target(made), LMDrafter(), registry.policy("beam"), gpu_options=GpuOptions(on)) for on in (False, True)
    )
    wanted, found = (each.generate(prompt(60), max_new_tokens=32, eos=()) for each in (host, device))
    assert found.token_ids == wanted.token_ids and device.fallback == ""
    assert device.gpu_runner is not None
    cache = device.gpu_runner.gpu_target.graph_cache
    assert cache.graphs and not cache.failures
