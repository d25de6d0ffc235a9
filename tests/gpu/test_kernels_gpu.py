"""The kernels at full size on a CUDA device, alone and inside a captured graph."""

from __future__ import annotations

import pytest
import torch

from helpers.family_kernels import check_activations, check_norm_styles, check_rotations
from helpers.kernels import (
    both,
    check_attention,
    check_chain,
    check_close_draws,
    check_draw,
    check_enter,
    check_gelu_and_cap,
    check_head_norms,
    check_lazy_logits,
    check_levels,
    check_noise,
    check_norm,
    check_norm_kinds,
    check_pair_children,
    check_partial_rotation,
    check_paths,
    check_rotation,
    check_top,
    check_window,
    make_cache,
    random_tree,
)
from windfall.core.sampling import signed
from windfall.kernels import draw, tree_attention
from windfall.kernels.backend import triton_installed
from windfall.kernels.rules import Rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not triton_installed(), reason="no CUDA device or no Triton"),
]


@both
@pytest.mark.parametrize(("heads", "shared", "width"), [(9, 3, 64), (32, 8, 128), (8, 1, 128), (4, 4, 80)])
@pytest.mark.parametrize("n", [1, 2, 10, 64, 128, 241])
@pytest.mark.parametrize(("length", "capacity"), [(5, 256), (200, 512), (1000, 4096), (5000, 8192)])
def test_attention(n: int, heads: int, shared: int, width: int, length: int, capacity: int, dtype: torch.dtype) -> None:
    check_attention(n, heads, shared, width, length, capacity, dtype, "cuda")


@both
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("n", [1, 10, 64])
@pytest.mark.parametrize(
    ("length", "capacity", "window"),
    [(200, 512, 5), (200, 512, 100), (1000, 4096, 64), (5000, 8192, 2048), (2100, 8192, 4096), (0, 8192, 2048)],
)
def test_attention_in_a_window(n: int, length: int, capacity: int, window: int, width: int, dtype: torch.dtype) -> None:
    check_window(n, length, capacity, window, dtype, "cuda", width)


@both
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("length", "capacity"), [(120, 256), (1020, 2048), (8190, 16_384)])
def test_a_chain_is_decoding_step_by_step(width: int, length: int, capacity: int, dtype: torch.dtype) -> None:
    check_chain(12, width, length, capacity, dtype, "cuda")


@both
@pytest.mark.parametrize(("heads", "shared", "width"), [(9, 3, 64), (32, 8, 128), (8, 1, 128), (4, 4, 80)])
@pytest.mark.parametrize("n", [12, 64, 200])
@pytest.mark.parametrize(
    ("length", "capacity"), [(0, 256), (61, 512), (250, 1024), (255, 1024), (510, 2048), (1021, 4096), (5000, 8192)]
)
def test_paths(n: int, heads: int, shared: int, width: int, length: int, capacity: int, dtype: torch.dtype) -> None:
    check_paths(n, heads, shared, width, length, capacity, dtype, "cuda")


@pytest.mark.parametrize(("count", "width"), [(4, 16_384), (15, 49_152), (35, 151_936)])
def test_the_noise_of_the_positions_ahead(count: int, width: int) -> None:
    check_noise(count, width, "cuda")


@both
@pytest.mark.parametrize("n", [1, 10, 64])
@pytest.mark.parametrize("vocabulary", [16_384, 49_152, 151_936])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_draw(n: int, vocabulary: int, temperature: float, dtype: torch.dtype) -> None:
    check_draw(n, vocabulary, dtype, temperature, "cuda")
    check_close_draws(n, vocabulary, "cuda")


@both
@pytest.mark.parametrize(("w", "k"), [(1, 1), (10, 10), (64, 16), (7, 32), (8, 64), (4, 128)])
@pytest.mark.parametrize("columns", [16_384, 49_152, 151_936])
@pytest.mark.parametrize(("dice", "named"), [(False, False), (True, False), (True, True)])
def test_top_children(w: int, k: int, columns: int, dice: bool, named: bool, dtype: torch.dtype) -> None:
    check_top(w, k, columns, dtype, dice, named, "cuda")


@pytest.mark.parametrize(("w", "k"), [(1, 1), (10, 10), (16, 16), (8, 64)])
@pytest.mark.parametrize(("columns", "width"), [(32_768, 576), (49_152, 576), (32_768, 4096), (131_072, 1024)])
@pytest.mark.parametrize(("dice", "bias"), [(False, False), (True, True)])
def test_lazy_logits(w: int, k: int, columns: int, width: int, dice: bool, bias: bool) -> None:
    check_lazy_logits(w, k, columns, width, dice, bias, "cuda")


@both
@pytest.mark.parametrize("n", [1, 10, 64])
@pytest.mark.parametrize("width", [576, 1536, 4096, 14_336])
def test_norm_and_gate(n: int, width: int, dtype: torch.dtype) -> None:
    check_norm(n, width, dtype, "cuda")


@both
@pytest.mark.parametrize("n", [1, 10, 64])
@pytest.mark.parametrize(("heads", "shared", "width"), [(9, 3, 64), (32, 8, 128)])
def test_rotate_and_store(n: int, heads: int, shared: int, width: int, dtype: torch.dtype) -> None:
    check_rotation(n, heads, shared, width, dtype, "cuda")


@both
@pytest.mark.parametrize("n", [1, 10, 64])
@pytest.mark.parametrize("width", [640, 2880, 5376])
def test_kinds_of_norms_and_gates(n: int, width: int, dtype: torch.dtype) -> None:
    check_norm_kinds(n, width, dtype, "cuda")
    check_gelu_and_cap(n, width, dtype, "cuda")


@both
@pytest.mark.parametrize("n", [1, 10, 64])
@pytest.mark.parametrize(("heads", "shared", "width"), [(16, 8, 128), (4, 1, 256), (4, 2, 80)])
def test_norms_of_heads(n: int, heads: int, shared: int, width: int, dtype: torch.dtype) -> None:
    check_head_norms(n, heads, shared, width, dtype, "cuda")


@both
@pytest.mark.parametrize("n", [1, 10, 64])
@pytest.mark.parametrize(("heads", "shared", "width", "rotated"), [(24, 8, 128, 96), (32, 32, 96, 48)])
def test_partial_rotation(n: int, heads: int, shared: int, width: int, rotated: int, dtype: torch.dtype) -> None:
    check_partial_rotation(n, heads, shared, width, rotated, dtype, "cuda")


@both
@pytest.mark.parametrize("n", [1, 10, 64])
@pytest.mark.parametrize("width", [640, 2880, 5376])
def test_styles_of_norms_and_activations(n: int, width: int, dtype: torch.dtype) -> None:
    check_norm_styles(n, width, dtype, "cuda")
    check_activations(n, width, dtype, "cuda")


@both
@pytest.mark.parametrize("n", [1, 10, 64])
@pytest.mark.parametrize(
    ("name", "heads", "shared", "width", "rotated"),
    [("cohere", 32, 8, 128, 128), ("glm", 32, 2, 128, 64), ("olmo2", 32, 32, 128, 128), ("olmo2", 40, 8, 128, 0)],
)
def test_rotations(name: str, n: int, heads: int, shared: int, width: int, rotated: int, dtype: torch.dtype) -> None:
    check_rotations(name, n, heads, shared, width, rotated, dtype, "cuda")


@pytest.mark.parametrize("n", [1, 10, 16, 17, 32, 48, 64])
@pytest.mark.parametrize(("width", "inner", "heads", "shared", "d"), [(576, 1536, 9, 3, 64), (512, 768, 8, 2, 64)])
def test_into_a_layer(n: int, width: int, inner: int, heads: int, shared: int, d: int) -> None:
    check_enter(n, width, inner, heads, shared, d, "cuda")


def test_a_graph_serves_other_lengths_masks_and_seeds() -> None:
    """Captured at one length and seed, replayed at others: everything that changes is read on the device."""
    n, capacity = 16, 4096
    keys, values = make_cache(3, capacity, 64, capacity, torch.bfloat16, "cuda")
    queries = torch.randn(n, 9, 64, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(n, 49_152, device="cuda")
    mask, length = random_tree(n, 1).mask().cuda(), torch.tensor([7], device="cuda")
    seed, heat, positions = torch.tensor([1], device="cuda"), torch.ones(1, device="cuda"), torch.arange(n).cuda()
    for _ in range(2):
        tree_attention(queries, keys, values, length, mask), draw(logits, positions, seed, heat)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = tree_attention(queries, keys, values, length, mask)
        drawn = draw(logits, positions, seed, heat)
    for trial, now in enumerate((0, 500, 4000)):
        length.fill_(now)
        seed.fill_(signed(2**64 - 1 - trial))
        mask.copy_(random_tree(n, trial + 2).mask())
        graph.replay()
        assert torch.equal(made, tree_attention(queries, keys, values, length, mask))
        assert torch.equal(drawn, draw(logits, positions, seed, heat))


@pytest.mark.parametrize("candidates", [16, 32])
@pytest.mark.parametrize(
    ("rank", "parts", "hidden"),
    [(64, 1, True), (256, 1, True), (256, 1, False), (64, 2, True), (64, 3, True), (256, 3, True)],
)
def test_children_with_pair_scores(candidates: int, rank: int, parts: int, hidden: bool) -> None:
    check_pair_children(candidates, rank, parts, hidden, True, "cuda")


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize(("width", "candidates"), [(6, 8), (3, 64)])
@pytest.mark.parametrize(
    ("rule", "parts", "noisy"),
    [(Rule(), 1, False), (Rule(calibrated=True), 2, True), (Rule(whole=True), 0, False), (Rule(), 3, True)],
)
def test_all_levels_at_once(rule: Rule, parts: int, noisy: bool, batch: int, width: int, candidates: int) -> None:
    check_levels(rule, parts, noisy, batch, width, candidates, "cuda")
