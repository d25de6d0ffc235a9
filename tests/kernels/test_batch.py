"""The kernels for trees of several requests: as torch computes them, and in a second process under Triton's
interpreter; tests/gpu runs them on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.batch_kernels import (
    BATCH_RULES,
    check_appending,
    check_batch_growth,
    check_descriptions,
    check_disjoint_moves,
    check_draws_of_requests,
    check_roots,
    check_rows_of_trees,
)
from helpers.interpreter import HALF, INTERPRETED
from helpers.tree_kernels import make_calibration, make_calibrator
from windfall.kernels.trees import Calibration
from windfall.policies.shape import Shape


@pytest.mark.parametrize(
    ("sizes", "live", "rows", "limits", "floor"),
    [
        ([9, 20, 1, 14], 4, 16, [20, 20, 20, 20], -math.inf),  # more nodes than rows
        ([9, 20, 1, 14], 3, 16, [4, 2, 9, 5], -math.inf),
        ([9, 20, 1, 14], 4, 64, [40, 40, 40, 40], -math.inf),  # all fit
        ([9, 20, 1, 14], 4, 13, [20, 20, 20, 20], -1.0),
        ([40], 1, 16, [40], -math.inf),
        ([5, 8, 12], 3, 3, [9, 9, 9], -math.inf),  # only the roots fit
        ([40, 3, 20, 33, 2, 9], 5, 30, [40, 2, 9, 1, 2, 9], -4.0),
        ([1, 1], 2, 5, [1, 1], 0.5),
    ],
)
def test_rows(sizes: list[int], live: int, rows: int, limits: list[int], floor: float) -> None:
    for seed in range(1 if INTERPRETED else 8):
        check_rows_of_trees(sizes, live, rows, limits, 5, seed, tied=(seed + rows) % 2 == 0, floor=floor)


@pytest.mark.parametrize("seed", range(3 if INTERPRETED else 40))
def test_rows_of_random_sizes(seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    requests = int(torch.randint(1, 9, (1,), generator=chance))
    sizes, limits = (torch.randint(1, 30, (requests,), generator=chance).tolist() for _ in range(2))
    live = int(torch.randint(1, requests + 1, (1,), generator=chance))
    rows = int(torch.randint(live, 60, (1,), generator=chance))
    check_rows_of_trees(sizes, live, rows, limits, 4, seed, seed % 2 == 1, tile_rows=1 + seed % 5)


@pytest.mark.parametrize(("requests", "rows"), [(1, 1), (5, 7), (3, 70)])
def test_appending(requests: int, rows: int) -> None:
    check_appending(requests, rows)


@pytest.mark.parametrize(("requests", "capacity", "size"), [(1, 9, 5), (5, 40, 300)])
def test_descriptions(requests: int, capacity: int, size: int) -> None:
    check_descriptions(requests, capacity, size)


@pytest.mark.parametrize(("requests", "used"), [(1, 1), (7, 5), (20, 20)])
def test_roots(requests: int, used: int) -> None:
    check_roots(requests, used)


@pytest.mark.parametrize("name", BATCH_RULES)
def test_growth(name: str) -> None:
    calibration, shape = None, None
    if BATCH_RULES[name].calibrated:
        each = [make_calibration(make_calibrator(seed), "cpu") for seed in range(2)]
        calibration = Calibration(*(torch.stack(x) for x in zip(*each, strict=True)))
        check_batch_growth(name, 2, 3, 3, each[0], passes=2)
    if name == "shape":
        shape = torch.full((9, 3), -1)
        for (parent, rank), child in Shape([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]).numbered().items():
            shape[parent, rank] = child
    check_batch_growth(name, 2, 4, 3, calibration, shape, masked=name != "best", passes=2 if INTERPRETED else 4)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
def test_draws(dtype: torch.dtype) -> None:
    check_draws_of_requests(5, 300, dtype)


@pytest.mark.parametrize(("moves", "width"), [(3, 16), (260, 24)])
def test_moves(moves: int, width: int) -> None:
    check_disjoint_moves(2, moves, width, HALF)
