"""Layers that compute their own products on a GPU: exact passes in CUDA graphs, or a reason why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from helpers.exact import check_one_hash, check_rows, check_texts, engine
from helpers.quantised import CountingLinear, OwnLinear, quantised
from helpers.tiny import prompt, tiny
from windfall.core.types import GpuOptions
from windfall.engine.gpu.target import choose_forward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


class HalfLinear(OwnLinear):
    """Multiplies in half precision: torch's kernel, and so the order of its sums, depends on the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scales)


class WaitingLinear(OwnLinear):
    """Lets the host wait for the device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.abs().max().item() >= 0 else x


def model(kind: Any) -> Any:
    return quantised(kind, hidden_size=256, intermediate_size=512, max_position_embeddings=1024).cuda()


@pytest.mark.parametrize("kind", [OwnLinear, CountingLinear, HalfLinear])
def test_passes_in_graphs_are_exact(kind: Any) -> None:
    made = model(kind)
    check_rows(made, 62, 40)
    check_one_hash(made, 150, (1, 8, 33, 250), (16, 40, 150, 512), pairs=True)
    assert check_texts(made, "beam", None, (60,), 24) > 1.5


def test_graphs_are_captured() -> None:
    made = engine(model(HalfLinear), "beam")
    made.generate(prompt(), max_new_tokens=16, eos=())
    assert made.gpu_runner is not None and made.exact_passes
    cache = made.gpu_runner.gpu_target.graph_cache
    assert cache.graphs and cache.enabled and not cache.failures


def test_layers_that_wait_for_the_device_run_without_graphs() -> None:
    made, plain = engine(model(WaitingLinear), "beam"), engine(model(OwnLinear), "none")
    with pytest.warns(UserWarning, match="its WaitingLinear layers cannot be captured as a CUDA graph: "):
        found = made.generate(prompt(), max_new_tokens=16, eos=()).token_ids
    assert found == plain.generate(prompt(), max_new_tokens=16, eos=()).token_ids
    assert made.gpu_runner is not None and made.exact_passes
    cache = made.gpu_runner.gpu_target.graph_cache
    assert not cache.enabled and not cache.graphs


def test_bitsandbytes_in_4_bits_is_exact(tmp_path: Any) -> None:
    pytest.importorskip("bitsandbytes")
    tiny(hidden_size=256, intermediate_size=512).save_pretrained(tmp_path)
    made = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True), dtype=torch.bfloat16
    )
    assert choose_forward(made, GpuOptions(True))[1] == ""
    check_texts(made, "beam", None, (60,), 24)
