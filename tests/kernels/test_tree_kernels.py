"""The kernels between passes against the host's own tree, policies and calibrator: here as torch computes them, in a
second process under Triton's interpreter, and from tests/gpu on a CUDA device."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.interpreter import HALF, INTERPRETED
from helpers.tree_kernels import (
    SELECTIVE,
    Host,
    check_accepting,
    check_choice,
    check_copy_to_host,
    check_growth,
    check_moving,
    check_pair,
    check_pruning,
    check_publish,
    check_rows,
    check_selection,
    check_shape,
    drafted_children,
    empty_next_pass,
    empty_tree,
    make_calibration,
    make_calibrator,
    rules,
)
from windfall.core.tree import DraftTree
from windfall.kernels import choose as choosing
from windfall.kernels import grow as growing
from windfall.kernels.accept import reset_to_root
from windfall.kernels.grow import grow
from windfall.kernels.rules import RULES
from windfall.policies.shape import Shape
from windfall.policies.static import SHAPES


@pytest.mark.parametrize(
    ("shape", "width"),
    [(SHAPES["eagle-1"], 4), (SHAPES["medusa"], 16), (Shape([(0,), (2,), (2, 1), (2, 1, 0), (0, 3)]), 3)],
)
def test_shapes(shape: Shape, width: int) -> None:
    check_shape(shape, width, 1)


@rules
@pytest.mark.parametrize(
    ("widths", "k", "deepest", "rows", "tied"),
    [
        ((1, 4, 4, 4), 4, 4, 20, False),
        ((1, 5, 5), 3, 3, 128, False),  # a frontier wider than what the root has; a last pass that does not fit
        ((1, 10, 10), 6, 18, 60, True),  # two blocks of `line`
        ((1, 3, 3, 3), 2, 2, 9, True),  # nothing below the second level: an exhausted frontier
        ((1, 8, 8, 8, 8), 8, 5, 241, False),
        ((1, 16, 16), 16, 3, choosing.MAX_VERIFY_ROWS, False),
        ((1, 1, 1), 1, 3, 1, False),
    ],
)
def test_growth(rule: str, widths: tuple[int, ...], k: int, deepest: int, rows: int, tied: bool) -> None:
    for seed in range(1 if INTERPRETED else 3):
        check_growth(rule, widths, k, seed, deepest, rows, tied)


@pytest.mark.parametrize("name", SELECTIVE)
@pytest.mark.parametrize(("width", "k", "tied"), [(12, 5, False), (3, 4, True)])
def test_selection(name: str, width: int, k: int, tied: bool) -> None:
    check_selection(name, width, k, 0, tied)


def test_the_choice_from_a_large_tree() -> None:
    """As many places as the device takes; each level has its own parents, and ties abound."""
    tree, passes, width, k = empty_tree(2500, 24, "cpu"), 24, 10, 10
    reset_to_root(tree, torch.tensor([3]))
    host, nodes = Host(DraftTree.root(3), [0], [0.0], [1.0]), torch.zeros(1, dtype=torch.long)
    for turn in range(passes):
        tokens, logq = drafted_children(len(nodes), k, turn, tied=True)
        host.extend(nodes.tolist(), tokens, logq, None)
        growing.append(tree, nodes, tokens, logq, None)
        nodes = torch.tensor(host.places[-width:])
    assert host.used == 1 + k * (1 + width * (passes - 1)) > 2048
    for rows, limit in ((61, None), (61, 1 + k * (1 + width * 10)), (choosing.MAX_VERIFY_ROWS, None)):
        check_choice(tree, host, rows, limit, "cpu")


def test_certainty_and_its_opposite() -> None:
    """Calibrator.accept clips: log-probabilities of 0 and far below are finite chances."""
    calibrator = make_calibrator(5)
    tree, next_pass = empty_tree(20, 3, "cpu"), empty_next_pass(2, 4, "cpu")
    reset_to_root(tree, torch.tensor([1]))
    logq = torch.tensor([[0.0, -1e-7, -1e-3, -0.7, -9.0, -200.0]])
    root, calibration = torch.zeros(1, dtype=torch.long), make_calibration(calibrator, "cpu")
    grow(tree, root, torch.arange(6)[None], logq, next_pass, RULES["calibrated"], calibration)
    drawn = DraftTree.root(1).extend(torch.zeros(6, dtype=torch.long), torch.arange(6), logq[0], torch.arange(6))
    chances = calibrator.accept(drawn)
    torch.testing.assert_close(tree.chance[1:7], torch.tensor(chances) / max(1.0, sum(chances)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("ordinary", [2.0, math.inf])
@pytest.mark.parametrize(("width", "k"), [(1, 1), (1, 3), (10, 3), (7, 16), (32, 5)])
def test_pruning(width: int, k: int, ordinary: float) -> None:
    for seed in range(4):
        check_pruning(width, k, seed, ordinary)


@pytest.mark.parametrize(
    ("size", "rows", "steps", "drafter"),
    [(1, 1, 1, False), (1, 4, 6, True), (30, 30, 5, True), (50, 64, 9, True), (257, 257, 9, True), (230, 320, 9, True)],
)
def test_accepting(size: int, rows: int, steps: int, drafter: bool) -> None:
    for seed in range(2 if INTERPRETED else 6):
        check_accepting(size, rows, steps, seed, drafter)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
@pytest.mark.parametrize(("steps", "width", "features"), [(1, 16, 20), (7, 24, 1500), (80, 128, 40)])
def test_moving(steps: int, width: int, features: int, dtype: torch.dtype) -> None:
    check_moving(3, width, steps, features, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "half"])
@pytest.mark.parametrize(("n", "width", "normed"), [(1, 64, False), (3, 700, True)])
def test_pair_norm(n: int, width: int, normed: bool, dtype: torch.dtype) -> None:
    check_pair(n, width, dtype, normed)


@pytest.mark.parametrize("size", [8, 16, 1000, 9000])
def test_copy_to_host(size: int) -> None:
    check_copy_to_host(size)


@pytest.mark.parametrize("size", [16, 24, 1000, 9000])
def test_publish(size: int) -> None:
    check_publish(size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("n", "width", "across"), [(1, 8, 4), (7, 576, 128), (64, 100, 24)])
def test_rows(n: int, width: int, across: int, dtype: torch.dtype) -> None:
    check_rows(n, width, across, dtype)
