"""The kernels between passes at full size on a CUDA device, alone and inside a captured graph."""

from __future__ import annotations

import pytest
import torch

from helpers.tree_kernels import (
    SELECTIVE,
    check_announcing,
    check_growth,
    check_moving,
    check_pair,
    check_pruning,
    check_rows,
    check_selection,
    check_settling,
    check_shape,
    check_telling,
    empty_rows,
    empty_tree,
    rules,
    same,
    some_terms,
    sprouts,
)
from windfall.costs.acceptance import Calibrator
from windfall.kernels.backend import installed
from windfall.kernels.grow import RULES, grow
from windfall.kernels.publish import NUMBER, announce, tell
from windfall.kernels.settle import plant
from windfall.kernels.trees import Ahead, TreeArrays
from windfall.policies.static import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not installed(), reason="no CUDA device or no Triton"),
]
both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "half"])


@rules
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("widths", "k", "deepest", "rows"),
    [
        ((1, 10, 10, 10, 10, 10), 10, 6, 60),
        ((1, *[16] * 7), 8, 8, 128),
        ((1, *[16] * 7), 16, 31, 64),
        ((1, *[10] * 11), 10, 12, 241),
        ((1, *[10] * 23), 10, 24, 61),
        ((1, *[10] * 11), 10, 12, 320),
        ((1, 8, 8), 3, 3, 24),
        ((1, 3, 3, 3), 2, 2, 9),
        ((1, 64, 64), 12, 2, 100),
        ((1, 1, 1), 1, 3, 1),
    ],
)
def test_growth(rule: str, widths: tuple[int, ...], k: int, deepest: int, rows: int, tied: bool) -> None:
    for seed in range(4):
        check_growth(rule, widths, k, seed, deepest, rows, tied, "cuda")


@pytest.mark.parametrize(("width", "k"), [(1, 3), (10, 3), (7, 16), (32, 16)])
def test_pruning(width: int, k: int) -> None:
    for seed in range(10):
        check_pruning(width, k, seed, device="cuda")


@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize(
    ("size", "rows", "steps"), [(1, 1, 1), (7, 8, 40), (60, 60, 7), (128, 128, 64), (230, 241, 9), (257, 320, 9)]
)
def test_settling(size: int, rows: int, steps: int, drafter: bool) -> None:
    for seed in range(10):
        check_settling(size, rows, steps, seed, drafter, "cuda")


@both
@pytest.mark.parametrize("heads", [60, 512])
@pytest.mark.parametrize(
    ("steps", "width", "features"), [(1, 64, 576), (7, 128, 12_288), (33, 64, 1728), (80, 128, 40)]
)
def test_moving(heads: int, steps: int, width: int, features: int, dtype: torch.dtype) -> None:
    for _ in range(5):
        check_moving(heads, width, steps, features, dtype, "cuda")


@both
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("n", "width"), [(1, 576), (10, 4096), (64, 5120)])
def test_pair_norm(n: int, width: int, normed: bool, dtype: torch.dtype) -> None:
    check_pair(n, width, dtype, normed, "cuda")


@pytest.mark.parametrize("name", SELECTIVE)
@pytest.mark.parametrize(("width", "k"), [(3, 4), (10, 10), (60, 16)])
@pytest.mark.parametrize("tied", [False, True])
def test_selection(name: str, width: int, k: int, tied: bool) -> None:
    for seed in range(3):
        check_selection(name, width, k, seed, tied, "cuda")


@rules
def test_a_graph_serves_every_pass(rule: str) -> None:
    """Captured once, replayed pass after pass over the same buffers."""
    width, k, passes = 8, 6, 5
    terms = some_terms(Calibrator(), "cuda") if rule == "calibrated" else None
    tree, ahead = empty_tree(400, passes, "cuda"), empty_rows(width, width * passes, "cuda")
    tokens, logq = (x.cuda() for x in sprouts(width, k, 0, False))

    def begin(tree: TreeArrays, ahead: Ahead) -> None:
        tree.slot.zero_()
        plant(tree, torch.tensor([5], device="cuda"))
        ahead.staged.zero_()
        ahead.expanded.fill_(-1)
        ahead.nodes.fill_(-1)
        ahead.nodes[0] = 0

    begin(tree, ahead)
    grow(tree, ahead.nodes, tokens, logq, ahead, RULES[rule], terms)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grow(tree, ahead.nodes, tokens, logq, ahead, RULES[rule], terms)
    twin, other = empty_tree(400, passes, "cuda"), empty_rows(width, width * passes, "cuda")
    begin(tree, ahead)
    begin(twin, other)
    for turn in range(passes):
        drawn = sprouts(width, k, turn + 1, turn % 2 == 1)
        tokens.copy_(drawn[0])
        logq.copy_(drawn[1])
        graph.replay()
        grow(twin, other.nodes, tokens, logq, other, RULES[rule], terms)
        same(tree, twin, 1 + (turn + 1) * width * k)
        same(ahead, other, 0)


@pytest.mark.parametrize("size", [16, 1000, 12_000, 50_000])
def test_telling(size: int) -> None:
    check_telling(size, "cuda")


@pytest.mark.parametrize("size", [16, 1000, 12_000, 50_000])
def test_announcing(size: int) -> None:
    check_announcing(size, "cuda")


@pytest.mark.parametrize("size", [16, 12_000])
def test_what_is_announced_is_there_when_its_number_is(size: int) -> None:
    """The host looks on while the device writes, and never sees a number before what it numbers."""
    there = torch.zeros(size, dtype=torch.uint8, device="cuda")
    blocks, numbers = torch.zeros(2, size + NUMBER, dtype=torch.uint8, pin_memory=True), there.view(torch.int64)
    turn, done = torch.zeros(1, dtype=torch.long, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    announce(there, blocks, turn, done)
    turn.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.add_(1)
        announce(there, blocks, turn, done)
    seen = blocks.view(torch.int64).numpy()
    for number in range(1, 400):
        graph.replay()
        told = seen[number % 2]
        while told[size // 8] != number:
            pass
        assert (told[: size // 8] == number).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "width", "across"), [(1, 8, 4), (7, 576, 128), (64, 4096, 256), (320, 576, 128)])
def test_rows(n: int, width: int, across: int, dtype: torch.dtype) -> None:
    check_rows(n, width, across, dtype, "cuda")


def test_what_a_recorded_pass_tells_is_there_when_it_is_waited_for() -> None:
    there = torch.zeros(16, dtype=torch.uint8, device="cuda")
    here, numbers = torch.zeros(16, dtype=torch.uint8, pin_memory=True), there.view(torch.int64)
    tell(there, here)
    torch.cuda.synchronize()
    graph, done = torch.cuda.CUDAGraph(), torch.cuda.Event()
    with torch.cuda.graph(graph):
        numbers.add_(1)
        tell(there, here)
    seen = here.view(torch.int64).numpy()
    for turn in range(1, 200):
        graph.replay()
        done.record()
        done.synchronize()
        assert seen.tolist() == [turn, turn]


@pytest.mark.parametrize(("name", "width"), [("eagle-1", 4), ("eagle-1", 16), ("medusa", 16)])
def test_shapes(name: str, width: int) -> None:
    for seed in range(4):
        check_shape(SHAPES[name], width, seed, "cuda")
