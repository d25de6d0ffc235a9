"""Models with windfall's attention on a CUDA device: logits, CUDA graphs, and batches in pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.architectures import build
from helpers.fused import logits_of
from helpers.tiny import prompt
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.engine.gpu.interface import InterfaceForward
from windfall.engine.gpu.target import modules_forward
from windfall.kernels.backend import triton_installed
from windfall.model.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("only_llama_is_fused"),
    pytest.mark.skipif(not torch.cuda.is_available() or not triton_installed(), reason="no CUDA device or no Triton"),
]
MODELS = ["cohere2", "gemma3n_text", "llama4_text", "mimo_v2_flash", "olmo3", "smollm3", "starcoder2"]
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 2048}


def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return build(name, **WIDE).to("cuda", dtype)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    made = model(name)
    assert isinstance(modules_forward(made), InterfaceForward)
    found, wanted = logits_of(made, 150, 24)
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["cohere2", "llama4_text", "olmo3"])
def test_logits_in_bf16_are_near_those_of_transformers(name: str) -> None:
    found, wanted = (each.float() for each in logits_of(model(name, torch.bfloat16), 150, 24))
    assert (found - wanted).abs().mean() < 0.05 * wanted.std()


@pytest.mark.parametrize("name", ["cohere2", "gemma3n_text", "olmo3", "smollm3", "starcoder2"])
def test_texts_run_in_graphs_and_batches_in_pages(name: str) -> None:
    made = model(name)
    host, device = (
        Engine(Target(made), LMDrafter(), registry.policy("beam"), gpu_options=GpuOptions(on)) for on in (False, True)
    )
    texts, asked = [prompt(60), prompt(20, seed=1), prompt(9, seed=2)], {"max_new_tokens": 32, "eos": ()}
    wanted = [host.generate(text, **asked).token_ids for text in texts]
    assert device.generate(texts[0], **asked).token_ids == wanted[0] and device.fallback == ""
    assert [each.token_ids for each in device.generate_batch(texts, **asked)] == wanted
    assert device.batch_fallback == "" and device.gpu_runner is not None
    cache = device.gpu_runner.gpu_target.graph_cache
    assert cache.graphs and not cache.failures, cache.last_failure
