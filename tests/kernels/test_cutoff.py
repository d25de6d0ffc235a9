"""Top-k, top-p and min-p as cutoffs: as torch computes them, and in a second process under Triton's interpreter;
tests/gpu runs them on a GPU."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from helpers.cutoffs import (
    MIXED,
    Settings,
    check_coupling,
    check_cut_draws,
    check_cutoffs,
    kept_by_definition,
    make_logits,
    on_device,
)
from helpers.interpreter import HALF, INTERPRETED, both
from windfall.core.sampling import process, warp
from windfall.core.types import SamplingParams
from windfall.kernels.cutoff import cutoffs

plain = pytest.mark.skipif(INTERPRETED, reason="this is about torch")


@plain
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("width", [1, 2, 9, 150])
def test_definition(width: int, tied: bool) -> None:
    """All three filters in all combinations, against adding weights one by one."""
    choices = (0.3, 1.0, 2.5), (0, 1, 5, 9, 400), (1.0, 0.999, 0.7, 0.1, 1e-30), (0.0, 1e-3, 0.2, 1.0)
    settings: list[Settings] = list(itertools.product(*choices))
    logits = make_logits(2, width, torch.float32, "cpu", tied)
    for each in settings:
        kept = logits >= cutoffs(logits, *on_device([each]))[:, None]
        assert kept.tolist() == [kept_by_definition(row, each) for row in logits.tolist()], each
        params = SamplingParams(temperature=each[0], top_k=each[1], top_p=each[2], min_p=each[3])
        assert torch.equal(warp(logits, params) > -torch.inf, kept), each
        assert torch.equal(process(logits, None, 0, params) > -torch.inf, kept), each


@plain
def test_ties_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, -2.0, 1.0]])
    for each in ((1.0, 2, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 2, 0.9, 0.0)):
        assert (logits >= cutoffs(logits, *on_device([each]))).tolist() == [[True, True, True, False, True]]


@plain
def test_double_precision() -> None:
    logits = make_logits(4, 60, torch.float64, "cpu", False)
    found = cutoffs(logits, *on_device([(0.9, 20, 0.8, 0.0)]))
    assert found.dtype == torch.float64 and all(cut in row for cut, row in zip(found, logits, strict=True))


@both
@pytest.mark.parametrize(("width", "tied"), [(300, True), (700, False)])
def test_requests_with_own_filters(width: int, tied: bool, dtype: torch.dtype) -> None:
    parts = {(torch.float32, True): MIXED[2::3], (torch.float32, False): MIXED[5:7], (HALF, True): MIXED}
    settings = parts.get((dtype, tied), MIXED[:3]) if INTERPRETED else MIXED  # it takes long there
    check_cutoffs(settings, len(settings), width, dtype, tied)


def test_infinite_logits() -> None:
    """Processors exclude tokens with -inf, and may force one with +inf."""
    logits = torch.full((3, 40), -math.inf)
    logits[0, :3] = torch.tensor([1.0, 2.0, 3.0])
    logits[1, 5] = math.inf
    logits[1, 6] = 1.0
    found = cutoffs(logits.to(HALF), *on_device([(1.0, 8, 0.9, 0.0)]))
    assert found.tolist() == [2.0, math.inf, -math.inf]


@both
@pytest.mark.parametrize("named", [False, True])
def test_draws_and_children(named: bool, dtype: torch.dtype) -> None:
    check_cut_draws(4, 200 if INTERPRETED else 1500, dtype, named)


def test_coupled_drafting() -> None:
    check_coupling(300, SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=5))
