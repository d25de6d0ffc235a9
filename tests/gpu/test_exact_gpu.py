"""Exact passes with the GPU's own products: bf16 texts and logits are plain decoding's, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.exact import POLICIES, check_one_hash, check_rows, check_texts, engine
from helpers.kernels import check_matmul
from helpers.tiny import prompt, tiny
from windfall.kernels.backend import triton_installed
from windfall.kernels.eight_bits import MAX_ROWS, EightBitWeight
from windfall.kernels.norm import gate_mul
from windfall.kernels.product import linear, norm_gate, norm_rotate, product

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
    more = {"head_dim": 128} if request.param == "qwen3" else {}
    made = tiny(request.param, dtype=torch.bfloat16, **SHAPE, **more)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.div_(4)  # a wide model needs smaller weights: near-ties are what this is about
    return made.cuda()


ROWS = (1, 2, 7, 16, 17, 32, 33, 64, 65, 96, 128, 160, 200, 256, 320, 384, 512, 640)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        (576, 49_152),
        (1536, 2048),
        (1536, 1536),
        (8960, 1536),
        (4096, 6144),
        (4096, 4096),
        (14_336, 4096),
        (4096, 28_672),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_products_round_a_row_alike_for_any_number_of_rows(inner: int, outer: int, bias: bool) -> None:
    check_matmul(ROWS, outer, inner, bias, "cuda")


@pytest.mark.parametrize(("inner", "outer"), [(576, 3072), (1536, 17_920), (4096, 28_672)])
def test_products_with_a_gate_round_like_two_kernels(inner: int, outer: int) -> None:
    from windfall.kernels.triton.gate_product import gate_product, supported

    torch.manual_seed(0)
    x = torch.randn(max(ROWS), inner, device="cuda").bfloat16()
    weight = (torch.randn(outer, inner, device="cuda") / inner**0.5).bfloat16()
    wanted = gate_mul(product(x, weight, None, True))
    for count in ROWS:
        own = x[len(x) - count :]
        made = gate_product(own, weight) if supported(own, weight) else gate_mul(product(own, weight, None, True))
        assert torch.equal(made, wanted[len(x) - count :]), count


@pytest.mark.parametrize(("inner", "outer"), [(576, 49_152), (4096, 6144), (14_336, 4096)])
def test_products_with_weights_in_eight_bits(inner: int, outer: int) -> None:
    check_matmul((1, 8, 33, 64), outer, inner, True, "cuda", eight_bits=True)
    torch.manual_seed(0)
    x, weight = torch.randn(140, inner, device="cuda"), torch.randn(outer, inner, device="cuda") / inner**0.5
    x[:, 5] *= 100  # outliers
    x, bias = x.bfloat16(), torch.randn(outer, device="cuda").bfloat16()
    small = EightBitWeight(weight.bfloat16(), bias)
    rounded = small.values.double() * small.scales.double()[:, None]
    for count in (1, 8, 17, 33, 64, MAX_ROWS, 140):  # more than MAX_ROWS rows are multiplied with the full weight
        used = rounded if count <= MAX_ROWS else small.full.double()
        wanted = torch.nn.functional.linear(x[:count].double(), used, bias.double())
        made = small(x[:count])
        torch.testing.assert_close(made.double(), wanted, atol=2e-2, rtol=2e-2)
        assert torch.equal(small(x[:count]), made), count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_products_round_a_row_alike_for_any_number_of_rows(dtype: torch.dtype) -> None:
    """The products of a layer of the embedded model, with the norms before them."""
    torch.manual_seed(0)
    width, inner, d, kv_heads, rows = 576, 1536, 64, 3, max(ROWS)
    x, residual = (torch.randn(rows, width, device="cuda").to(dtype) for _ in range(2))
    norm = torch.rand(width, device="cuda").to(dtype) + 0.5
    gate_up, qkv, down = (
        (torch.randn(size, k, device="cuda") / k**0.5).to(dtype)
        for size, k in ((2 * inner, width), (960, width), (width, inner))
    )
    wide = torch.randn(rows, inner, device="cuda").to(dtype)
    cos, sin = torch.randn(2, rows, d, device="cuda").to(dtype)

    def run(count: int) -> list[Tensor]:
        own = slice(rows - count, rows)
        keys, values = torch.zeros(2, kv_heads, rows, d, device="cuda", dtype=dtype)
        slots = torch.arange(count, device="cuda")
        gates, total = norm_gate(x[own], residual[own], norm, 1e-5, gate_up, True)
        queries, _ = norm_rotate(
            x[own], residual[own], norm, 1e-5, qkv, None, cos[own], sin[own], keys, values, slots, True
        )
        stored = [each[:, :count].transpose(0, 1) for each in (keys, values)]
        return [gates, total, queries, *stored, linear(wide[own], down, None, True)]

    whole = run(rows)
    for count in ROWS:
        for made, wanted in zip(run(count), whole, strict=True):
            assert torch.equal(made, wanted[rows - count :]), count


@pytest.mark.parametrize("size", [12, 64, 200])
@pytest.mark.parametrize("length", [9, 127, 255, 510, 1030])
def test_rows_of_a_tree_are_those_of_plain_decoding(model: Any, length: int, size: int) -> None:
    check_rows(model, length, size)


@pytest.mark.parametrize("length", [60, 500, 1030])
def test_logits_have_one_hash(model: Any, length: int) -> None:
    check_one_hash(
        model, length, (1, 2, 5, 16, 17, 33, 64, 65, 100, 128, 192, 320), (1 if length < 100 else 13, 128, 512)
    )


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
