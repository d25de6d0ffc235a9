"""Mixtures of experts at real sizes on a CUDA device, alone and inside a captured graph."""

from __future__ import annotations

import pytest
import torch

from helpers.experts import (
    Size,
    check_bits,
    check_experts,
    check_mixture,
    check_padding,
    check_ties,
    check_tiles,
    random_rows,
    random_weights,
)
from helpers.kernels import both
from windfall.kernels.backend import triton_installed
from windfall.kernels.experts import experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not triton_installed(), reason="no CUDA device or no Triton"),
]
SIZE = Size(hidden=2880, inner=2880, experts=8, top_k=4)  # of gpt-oss-20b, but for the number of experts
MANY = Size(hidden=512, inner=256, experts=128, top_k=4)  # as many experts as gpt-oss-120b has
UNEVEN = Size(hidden=200, inner=104, experts=12, top_k=3)
QWEN3 = Size(2048, 768, 128, 8, "qwen3-moe")  # of Qwen3-30B-A3B
MIXTRAL = Size(4096, 1792, 8, 2, "mixtral")
OLMOE = Size(2048, 1024, 64, 8, "olmoe")
ROWS = (1, 2, 7, 16, 17, 32, 33, 64, 65, 96, 128, 200, 320, 512)


@both
@pytest.mark.parametrize("n", [1, 5, 17, 64, 200, 512])
@pytest.mark.parametrize("size", [SIZE, QWEN3, MIXTRAL, OLMOE])
def test_experts(n: int, size: Size, dtype: torch.dtype) -> None:
    check_experts(n, size, dtype, "cuda")


@both
@pytest.mark.parametrize("size", [SIZE, MANY, UNEVEN])
@pytest.mark.parametrize(
    ("n", "kind"), [(1, "random"), (5, "missing"), (17, "same"), (40, "random"), (40, "ties"), (64, "same")]
)
def test_mixture(n: int, size: Size, kind: str, dtype: torch.dtype) -> None:
    check_mixture(n, size, dtype, kind, "cuda")


@both
@pytest.mark.parametrize("size", [SIZE, MANY, UNEVEN, QWEN3, MIXTRAL, OLMOE])
def test_a_row_has_the_same_bits_for_any_number_of_rows(size: Size, dtype: torch.dtype) -> None:
    check_bits(ROWS, size, dtype, "cuda")


@pytest.mark.parametrize("n", [1, 40, 200])
@pytest.mark.parametrize("size", [SIZE, UNEVEN, QWEN3])
def test_tiles_change_no_bit(n: int, size: Size) -> None:
    tiles = [(16, 64, 5, 7, 4), (16, 128, 4, 4, 4), (16, 32, 6, 6, 2), (32, 128, 4, 4, 4), (64, 128, 4, 4, 4)]
    check_tiles(n, size, [*tiles, (64, 64, 3, 3, 8), (128, 128, 3, 3, 8)], "cuda")


@both
def test_ties_go_to_the_lower_expert(dtype: torch.dtype) -> None:
    check_ties(dtype, "cuda")


@both
def test_rows_of_nan_stay_alone(dtype: torch.dtype) -> None:
    check_padding(SIZE, dtype, "cuda")


@pytest.mark.parametrize("n", [1, 16, 64])
def test_a_graph_serves_rows_that_choose_other_experts(n: int) -> None:
    torch.manual_seed(n)
    weights, x = random_weights(SIZE, torch.bfloat16, "cuda"), random_rows(n, SIZE, torch.bfloat16, "cuda")
    for _ in range(2):
        experts(x, *weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = experts(x, *weights)
    for _ in range(3):
        x.copy_(random_rows(n, SIZE, torch.bfloat16, "cuda"))
        graph.replay()
        assert torch.equal(made, experts(x, *weights))
