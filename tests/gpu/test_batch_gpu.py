"""The kernels for trees of several requests at full size on a CUDA device, alone and inside a captured graph."""

from __future__ import annotations

import math
import random

import pytest
import torch

from helpers.batch_kernels import (
    BATCH_RULES,
    STAGING,
    check_appending,
    check_batch_growth,
    check_descriptions,
    check_disjoint_moves,
    check_draws_of_requests,
    check_roots,
    check_rows_of_trees,
    filled_rows,
    random_trees,
)
from helpers.paged import check_pages
from helpers.tree_kernels import make_calibration, make_calibrator
from windfall.kernels.backend import triton_installed
from windfall.kernels.batch import choose_rows
from windfall.kernels.trees import Calibration
from windfall.policies.static import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not triton_installed(), reason="no CUDA device or no Triton"),
]
both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "half"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("requests", "live", "largest", "rows", "deepest", "floor"),
    [
        (1, 1, 241, 64, 6, -math.inf),
        (8, 8, 241, 128, 8, -math.inf),
        (8, 3, 241, 128, 8, -6.0),
        (64, 60, 200, 256, 12, -math.inf),
        (16, 16, 1021, 1024, 32, -math.inf),
        (256, 256, 60, 1024, 6, -math.inf),
        (256, 250, 300, 1024, 10, -math.inf),
        (256, 256, 9, 256, 3, -math.inf),
        (64, 17, 1021, 777, 32, -3.0),
    ],
)
def test_rows(requests: int, live: int, largest: int, rows: int, deepest: int, floor: float, tied: bool) -> None:
    for seed in range(2):
        chance = random.Random(seed)
        sizes = [chance.randint(1, largest) for _ in range(requests)]
        limits = [chance.choice([1, 4, 16, largest]) if seed else largest for _ in range(requests)]
        check_rows_of_trees(sizes, live, rows, limits, deepest, seed, tied, floor, 1 + 3 * seed, "cuda")


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([5, 130, 0, 63, 700, 2500], [1, 7, 3, 6, 40, 9]),
        ([70, 64, 1], [1, 1, 1]),
        ([900], [120]),
        ([37 * place % 1500 for place in range(64)], [1 + place % 9 for place in range(64)]),
    ],
)
def test_attention_over_pages(lengths: list[int], rows: list[int], trees: bool, dtype: torch.dtype) -> None:
    check_pages(lengths, rows, trees, dtype, "cuda")
    check_pages(lengths, rows, trees, dtype, "cuda", window=100)
    check_pages(lengths, rows, trees, dtype, "cuda", staged=False)
    check_pages(lengths, rows, trees, dtype, "cuda", prompts=tuple(range(0, len(lengths), 3)))


@pytest.mark.parametrize(("requests", "capacity", "size"), [(1, 9, 5), (64, 713, 384), (256, 1025, 4096)])
def test_descriptions(requests: int, capacity: int, size: int) -> None:
    check_descriptions(requests, capacity, size, "cuda")


@pytest.mark.parametrize(("requests", "used"), [(1, 1), (64, 60), (256, 256)])
def test_roots(requests: int, used: int) -> None:
    check_roots(requests, used, "cuda")


@pytest.mark.parametrize(("requests", "rows"), [(1, 1), (64, 9), (256, 33), (4, 600)])
def test_appending(requests: int, rows: int) -> None:
    check_appending(requests, rows, "cuda")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", BATCH_RULES)
@pytest.mark.parametrize(("requests", "width", "k"), [(1, 8, 6), (7, 4, 8), (64, 10, 10)])
def test_growth(name: str, requests: int, width: int, k: int, masked: bool) -> None:
    calibration, shape = None, None
    if BATCH_RULES[name].calibrated:
        each = [make_calibration(make_calibrator(seed), "cuda") for seed in range(requests)]
        calibration = Calibration(*(torch.stack(x) for x in zip(*each, strict=True)))
        check_batch_growth(name, requests, width, k, each[0], device="cuda")
    if name == "shape":
        _, children, rows = SHAPES["medusa"].extent
        shape = torch.full((rows, max(children, k)), -1, device="cuda")
        for (parent, rank), child in SHAPES["medusa"].numbered().items():
            shape[parent, rank] = child
    check_batch_growth(name, requests, width, k, calibration, shape, masked, device="cuda")


@both
@pytest.mark.parametrize(("n", "vocabulary"), [(1, 16_384), (64, 49_152), (40, 151_936)])
def test_draws(n: int, vocabulary: int, dtype: torch.dtype) -> None:
    check_draws_of_requests(n, vocabulary, dtype, "cuda")


@both
@pytest.mark.parametrize(("heads", "moves", "width"), [(60, 10, 64), (512, 300, 128), (60, 4096, 64)])
def test_moves(heads: int, moves: int, width: int, dtype: torch.dtype) -> None:
    check_disjoint_moves(heads, moves, width, dtype, "cuda")


def test_a_graph_serves_other_trees_and_numbers_of_requests() -> None:
    """Captured once; everything that changes is read on the device."""
    requests, capacity, deepest, size, tile_rows = 32, 100, 8, 128, 4
    trees = random_trees([capacity] * requests, capacity, deepest, 0, False, "cuda")
    live, floor = torch.tensor([requests], device="cuda"), torch.tensor([-math.inf], device="cuda")
    limits, lengths = (torch.full((requests,), number, device="cuda") for number in (40, 7))
    rows, twins = (filled_rows(size, requests, deepest, tile_rows, "cuda") for _ in range(2))
    choose_rows(trees, live, limits, floor, lengths, STAGING, tile_rows, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose_rows(trees, live, limits, floor, lengths, STAGING, tile_rows, rows)
    for turn in range(1, 6):
        chance = random.Random(turn)
        sizes = [chance.randint(1, capacity) for _ in range(requests)]
        for here, there in zip(trees, random_trees(sizes, capacity, deepest, turn, turn % 2 == 1, "cuda"), strict=True):
            here.copy_(there)
        live.fill_(chance.randint(1, requests))
        lengths.fill_(50 * turn)
        for array in (*rows, *twins):
            array.zero_()
        graph.replay()
        choose_rows(trees, live, limits, floor, lengths, STAGING, tile_rows, twins)
        assert all(map(torch.equal, rows, twins))
