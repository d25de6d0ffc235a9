"""The mixture of experts: here as torch computes it, in a second process under Triton's interpreter, and from tests/gpu
at full size on a CUDA device."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from helpers.experts import MLPS, Size, check_experts, check_mixture, check_padding, check_ties
from helpers.interpreter import both

SIZE = Size(hidden=128, inner=48, experts=6, top_k=3)
LINEAR = {  # as SIZE or UNEVEN
    kind: Size(128, 48, 6, 3, kind) if kind == "mixtral" else Size(104, 56, 20, 8, kind)
    for kind in MLPS
    if kind != "gpt-oss"
}
UNEVEN = Size(hidden=104, inner=56, experts=20, top_k=4)  # no multiples of a tile; more experts than some rows choose


@both
@pytest.mark.parametrize(
    ("n", "size"), [(1, SIZE), (5, UNEVEN), (24, UNEVEN), *((7, size) for size in LINEAR.values())]
)
def test_experts(n: int, size: Size, dtype: torch.dtype) -> None:
    check_experts(n, size, dtype)


@both
@pytest.mark.parametrize(
    ("n", "size", "kind"),
    [
        (1, UNEVEN, "random"),
        (5, SIZE, "missing"),
        (17, SIZE, "same"),
        (40, SIZE, "ties"),
        (70, Size(32, 16, 4, 2), "random"),  # of half precision in blocks of 64 rows
        (40, Size(32, 16, 3, 2), "same"),  # of 32
        (9, Size(64, 32, 4, 4), "random"),
        (3, Size(64, 32, 5, 1), "ties"),
        (1, LINEAR["qwen3-moe"], "random"),
        (17, LINEAR["mixtral"], "same"),
        (5, Size(64, 24, 9, 4, "olmoe"), "missing"),
        (70, Size(32, 16, 4, 2, "olmoe"), "random"),
    ],
)
def test_mixture(n: int, size: Size, kind: str, dtype: torch.dtype) -> None:
    check_mixture(n, size, dtype, kind)


@both
def test_ties_go_to_the_lower_expert(dtype: torch.dtype) -> None:
    check_ties(dtype)


@both
def test_rows_of_nan_stay_alone(dtype: torch.dtype) -> None:
    check_padding(SIZE, dtype)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_blocks_suffice() -> None:
    from windfall.kernels.triton.experts import block_bound

    torch.manual_seed(0)
    for n, top_k, experts, rows in ((1, 4, 32, 16), (8, 4, 32, 16), (64, 4, 32, 16), (100, 2, 8, 32), (5, 1, 3, 64)):
        bound = block_bound(n * top_k, experts, rows)
        for heat in (0.0, 0.5, 2.0, 100.0):
            logits = torch.randn(n, experts) + heat * torch.randn(experts)
            chosen = logits.topk(top_k).indices.flatten().bincount(minlength=experts)
            assert int((-(-chosen // rows)).sum()) <= bound
    assert block_bound(4, 32, 16) == 4 and block_bound(32, 32, 16) == 32
