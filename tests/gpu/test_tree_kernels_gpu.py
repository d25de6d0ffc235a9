"""The kernels between passes at full size on a CUDA device, alone and inside a captured graph."""

from __future__ import annotations

import pytest
import torch

from helpers.tree_kernels import (
    SELECTIVE,
    check_accepting,
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
    rules,
    same,
)
from windfall.costs.acceptance import Calibrator
from windfall.kernels.accept import reset_to_root
from windfall.kernels.backend import triton_installed
from windfall.kernels.grow import grow
from windfall.kernels.publish import SEQUENCE_BYTES, copy_to_host, publish
from windfall.kernels.rules import RULES
from windfall.kernels.trees import NextPass, TreeArrays
from windfall.policies.static import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not triton_installed(), reason="no CUDA device or no Triton"),
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
def test_accepting(size: int, rows: int, steps: int, drafter: bool) -> None:
    for seed in range(10):
        check_accepting(size, rows, steps, seed, drafter, "cuda")


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
    calibration = make_calibration(Calibrator(), "cuda") if rule == "calibrated" else None
    tree, next_pass = empty_tree(400, passes, "cuda"), empty_next_pass(width, width * passes, "cuda")
    tokens, logq = (x.cuda() for x in drafted_children(width, k, 0, False))

    def begin(tree: TreeArrays, next_pass: NextPass) -> None:
        tree.slot.zero_()
        reset_to_root(tree, torch.tensor([5], device="cuda"))
        next_pass.staged.zero_()
        next_pass.expanded.fill_(-1)
        next_pass.nodes.fill_(-1)
        next_pass.nodes[0] = 0

    begin(tree, next_pass)
    grow(tree, next_pass.nodes, tokens, logq, next_pass, RULES[rule], calibration)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grow(tree, next_pass.nodes, tokens, logq, next_pass, RULES[rule], calibration)
    twin, other = empty_tree(400, passes, "cuda"), empty_next_pass(width, width * passes, "cuda")
    begin(tree, next_pass)
    begin(twin, other)
    for turn in range(passes):
        drawn = drafted_children(width, k, turn + 1, turn % 2 == 1)
        tokens.copy_(drawn[0])
        logq.copy_(drawn[1])
        graph.replay()
        grow(twin, other.nodes, tokens, logq, other, RULES[rule], calibration)
        same(tree, twin, 1 + (turn + 1) * width * k)
        same(next_pass, other, 0)


@pytest.mark.parametrize("size", [16, 1000, 12_000, 50_000])
def test_copy_to_host(size: int) -> None:
    check_copy_to_host(size, "cuda")


@pytest.mark.parametrize("size", [16, 1000, 12_000, 50_000])
def test_publish(size: int) -> None:
    check_publish(size, "cuda")


@pytest.mark.parametrize("size", [16, 12_000])
def test_a_block_is_complete_when_its_number_is_visible(size: int) -> None:
    """The host polls while the device writes, and never sees a sequence number before its block is complete."""
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    blocks, numbers = (
        torch.zeros(2, size + SEQUENCE_BYTES, dtype=torch.uint8, pin_memory=True),
        source.view(torch.int64),
    )
    sequence, finished = (
        torch.zeros(1, dtype=torch.long, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    publish(source, blocks, sequence, finished)
    sequence.zero_()
    torch.cuda.synchronize()
    blocks.zero_()  # without the number of this first publication
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.add_(1)
        publish(source, blocks, sequence, finished)
    seen = blocks.view(torch.int64).numpy()
    for number in range(1, 400):
        graph.replay()
        block = seen[number % 2]
        while block[size // 8] != number:
            pass
        assert (block[: size // 8] == number).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "width", "across"), [(1, 8, 4), (7, 576, 128), (64, 4096, 256), (320, 576, 128)])
def test_rows(n: int, width: int, across: int, dtype: torch.dtype) -> None:
    check_rows(n, width, across, dtype, "cuda")


def test_a_captured_copy_to_host_is_complete_after_an_event() -> None:
    source = torch.zeros(16, dtype=torch.uint8, device="cuda")
    target, numbers = torch.zeros(16, dtype=torch.uint8, pin_memory=True), source.view(torch.int64)
    copy_to_host(source, target)
    torch.cuda.synchronize()
    graph, done = torch.cuda.CUDAGraph(), torch.cuda.Event()
    with torch.cuda.graph(graph):
        numbers.add_(1)
        copy_to_host(source, target)
    seen = target.view(torch.int64).numpy()
    for turn in range(1, 200):
        graph.replay()
        done.record()
        done.synchronize()
        assert seen.tolist() == [turn, turn]


@pytest.mark.parametrize(("name", "width"), [("eagle-1", 4), ("eagle-1", 16), ("medusa", 16)])
def test_shapes(name: str, width: int) -> None:
    for seed in range(4):
        check_shape(SHAPES[name], width, seed, "cuda")
