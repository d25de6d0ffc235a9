"""Top-k, top-p and min-p at full size on a CUDA device, alone and inside a captured graph."""

from __future__ import annotations

import pytest
import torch

from helpers.cutoffs import MIXED, check_coupling, check_cut_draws, check_cutoffs, make_logits, on_device
from helpers.kernels import both
from windfall.core.types import SamplingParams
from windfall.kernels.backend import triton_installed
from windfall.kernels.cutoff import cutoffs, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not triton_installed(), reason="no CUDA device or no Triton"),
]


@both
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("n", "width"), [(1, 49_152), (9, 32_000), (64, 151_936), (300, 128_256), (16, 262_208)])
def test_cutoffs(n: int, width: int, tied: bool, dtype: torch.dtype) -> None:
    check_cutoffs(MIXED, n, width, dtype, tied, "cuda")


def test_many_rows() -> None:
    check_cutoffs(MIXED, 4096, 32_064, torch.bfloat16, False, "cuda")


@both
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("n", [1, 12])
def test_draws_and_children(n: int, named: bool, dtype: torch.dtype) -> None:
    check_cut_draws(n, 49_152, dtype, named, "cuda")


def test_coupled_drafting() -> None:
    check_coupling(32_000, SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=5), "cuda")


@both
def test_a_graph_serves_other_filters(dtype: torch.dtype) -> None:
    """Captured with one request's settings, replayed with others and other logits."""
    logits, settings = make_logits(24, 49_152, dtype, "cuda", False), on_device(MIXED[:1], "cuda")
    cutoffs(logits, *settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = cutoffs(logits, *settings)
    for each in MIXED:
        for goal, value in zip(settings, on_device([each], "cuda"), strict=True):
            goal.copy_(value)
        logits.copy_(logits.roll(1, 0))
        graph.replay()
        assert torch.equal(made, reference(logits, *settings))
