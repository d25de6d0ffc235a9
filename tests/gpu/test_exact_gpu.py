"""Exact passes with the GPU's own products: bf16 texts and logits are plain decoding's, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from helpers.exact import POLICIES, check_rows, check_texts, engine
from helpers.tiny import prompt, tiny
from windfall.engine.gpu.target import EXACT_PASS_ROWS
from windfall.kernels.backend import triton_installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not triton_installed(), reason="no CUDA device or no Triton"),
]
SHAPE = {  # the embedded model's, of fewer layers
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    more = {"head_dim": 64} if request.param == "qwen3" else {}
    made = tiny(request.param, dtype=torch.bfloat16, **SHAPE, **more)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.div_(4)  # a wide model needs smaller weights: near-ties are what this is about
    return made.cuda()


@pytest.mark.parametrize(("inner", "outer"), [(576, 960), (576, 3072), (1536, 576), (576, 49_152), (4096, 6144)])
def test_products_of_one_size_round_every_row_alike(inner: int, outer: int) -> None:
    """What the matrix products must bring along: a row's place and its neighbours change nothing."""
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16) for rows in (EXACT_PASS_ROWS, outer))
    made = F.linear(x, weight)
    for turn in (1, 7, 32, 63):
        assert torch.equal(F.linear(x.roll(turn, 0), weight), made.roll(turn, 0))
    alone = torch.zeros_like(x)
    alone[0] = x[40]
    assert torch.equal(F.linear(alone, weight)[0], made[40])


@pytest.mark.parametrize("size", [12, 64, 200])
@pytest.mark.parametrize("length", [9, 127, 255, 510, 1030])
def test_rows_of_a_tree_are_those_of_plain_decoding(model: Any, length: int, size: int) -> None:
    check_rows(model, length, size)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("policy", POLICIES)
def test_texts_are_those_of_plain_decoding(model: Any, policy: str, sampling: dict[str, Any]) -> None:
    tau = check_texts(model, policy, None, (60, 200), 128, **sampling)
    assert policy == "auto" or tau > 1.5  # auto may find that a drafter as large as the target does not pay


def test_plain_decoding_is_exact_again_in_a_larger_cache(model: Any) -> None:
    """Earlier graphs and the capacity of the buffers do not matter."""
    made = engine(model, "beam")
    asked: dict[str, Any] = {"max_new_tokens": 96, "eos": ()}
    wanted = engine(model, "none").generate(prompt(100), **asked).token_ids
    assert made.generate(prompt(100), **asked).token_ids == wanted
    assert made.gpu_runner is not None
    made.gpu_runner.gpu_target.reserve(3 * made.gpu_runner.gpu_target.capacity)
    assert made.generate(prompt(100), **asked).token_ids == wanted
