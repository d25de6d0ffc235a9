"""The kernels against plain definitions: here as torch computes them, in a second process under Triton's interpreter,
and from tests/gpu at full size on a CUDA device."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from helpers.interpreter import HALF, INTERPRETED, both
from helpers.kernels import (
    check_attention,
    check_chain,
    check_close_draws,
    check_draw,
    check_enter,
    check_gelu_and_cap,
    check_head_norms,
    check_lazy_logits,
    check_levels,
    check_matmul,
    check_noise,
    check_norm,
    check_norm_kinds,
    check_pair_children,
    check_partial_rotation,
    check_path_options,
    check_paths,
    check_places,
    check_rotation,
    check_top,
    check_window,
    make_cache,
)
from windfall.kernels import path_attention, top_children, tree_attention
from windfall.kernels.eight_bits import EightBitWeight, row_scales
from windfall.kernels.norm import gate_mul
from windfall.kernels.product import by_pieces
from windfall.kernels.rules import Rule


@pytest.mark.parametrize(
    ("n", "heads", "shared", "width", "length", "capacity", "dtype"),
    [
        (12, 6, 2, 24, 0, 96, HALF),
        (7, 3, 1, 16, 61, 130, torch.float32),
        (7, 3, 1, 16, 63, 130, HALF),
        (7, 3, 1, 16, 126, 140, torch.float32),
        (7, 3, 1, 16, 1021, 1040, HALF),  # across a change of the size of parts
        (8, 6, 2, 72, 61, 130, HALF),  # a taller tile
        (7, 2, 1, 264, 31, 70, HALF),  # shorter blocks of keys
    ],
)
def test_paths(n: int, heads: int, shared: int, width: int, length: int, capacity: int, dtype: torch.dtype) -> None:
    check_paths(n, heads, shared, width, length, capacity, dtype)


@pytest.mark.parametrize(
    ("length", "window", "cap", "sinks", "dtype"),
    [
        (5, 3, None, False, HALF),
        (140, 40, 2.0, True, torch.float32),
        (140, 40, 2.0, True, HALF),
        (300, 128, None, True, HALF),
        (150, None, 5.0, False, torch.float32),
        (0, 2, None, True, HALF),
    ],
)
def test_windows_caps_and_sinks(
    length: int, window: int | None, cap: float | None, sinks: bool, dtype: torch.dtype
) -> None:
    check_path_options(length, 340, window, cap, sinks, dtype)


@pytest.mark.parametrize(
    ("length", "chunk", "dtype"),
    [(0, 2, HALF), (5, 3, torch.float32), (126, 128, HALF), (130, 40, HALF), (300, 64, HALF)],
)
def test_chunks(length: int, chunk: int, dtype: torch.dtype) -> None:
    check_path_options(length, 340, chunk, None, True, dtype, chunked=True)


@pytest.mark.parametrize(("n", "size"), [(1, 1), (7, 8), (20, 24)])
def test_places(n: int, size: int) -> None:
    check_places(n, size)


@pytest.mark.parametrize("rows", [1, 64, 70])
def test_products_by_pieces(rows: int) -> None:
    x, weight, bias = torch.randn(rows, 24), torch.randn(10, 24), torch.randn(10)
    torch.testing.assert_close(by_pieces(x, weight, bias), torch.nn.functional.linear(x, weight, bias))


@pytest.mark.skipif(not INTERPRETED, reason="the kernel has no torch form")
@pytest.mark.parametrize(
    ("rows", "outputs", "k", "bias", "eight_bits"),
    [
        ((1, 17, 40), 150, 64, True, False),
        ((3, 33), 200, 768, False, False),
        ((70,), 130, 512, True, False),
        ((2, 33), 150, 4096, True, True),
    ],
)
def test_matmul(rows: tuple[int, ...], outputs: int, k: int, bias: bool, eight_bits: bool) -> None:
    check_matmul(rows, outputs, k, bias, eight_bits=eight_bits)


@pytest.mark.skipif(not INTERPRETED, reason="the kernel has no torch form")
@pytest.mark.parametrize(("rows", "k"), [(70, 192), (40, 4096)])
@pytest.mark.parametrize("split", [False, True])
def test_matmul_of_tiles_with_further_rows(monkeypatch: pytest.MonkeyPatch, rows: int, k: int, split: bool) -> None:
    from windfall.kernels.triton import matmul

    monkeypatch.setattr(matmul, "choose_tile", lambda *given: matmul.Tile(64, 32, 64, 2, 4, True, 16))
    monkeypatch.setattr(matmul, "splits", lambda tiles, segments: split and segments > 1)
    check_matmul((rows,), 150, k, True)


@pytest.mark.skipif(not INTERPRETED, reason="the kernel has no torch form")
@pytest.mark.parametrize("further", [0, 16])
@pytest.mark.parametrize("gelu", [False, True])
def test_gate_product(monkeypatch: pytest.MonkeyPatch, further: int, gelu: bool) -> None:
    from windfall.kernels.triton import matmul
    from windfall.kernels.triton.gate_product import gate_product

    torch.manual_seed(0)
    x, weight = torch.randn(70, 192).to(HALF), (torch.randn(2 * 150, 192) / 14).to(HALF)
    monkeypatch.setattr(matmul, "choose_tile", lambda *given: matmul.Tile(128, 32, 64, 2, 4, True, further))
    assert torch.equal(gate_product(x, weight, gelu), gate_mul(matmul.matmul(x, weight, None), gelu))


@pytest.mark.skipif(not INTERPRETED, reason="the kernel has no torch form")
@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize(("k", "segments"), [(512, 1), (512, 2), (2048, 1), (2048, 3)])
@pytest.mark.parametrize(("outlier", "bias"), [(False, True), (True, False)])
def test_products_in_eight_bits(
    monkeypatch: pytest.MonkeyPatch, rows: int, k: int, segments: int, outlier: bool, bias: bool
) -> None:
    """They are close to the exact ones; without the rows' fine parts, they would not be."""
    from windfall.kernels.triton import int8_product

    torch.manual_seed(rows + k)
    choose = int8_product.choose_tile
    monkeypatch.setattr(int8_product, "choose_tile", lambda *given: choose(*given)._replace(segments=segments))
    x, values = torch.randn(rows, k).to(HALF), torch.randint(-127, 128, (150, k), dtype=torch.int8)
    scales, added = torch.rand(150) / 127 / k**0.5, torch.randn(150).to(HALF) if bias else None
    if outlier:
        x[:, 5] = 100 * x.abs().amax(1)
    made = int8_product.int8_product(x.float(), values, scales, added)
    assert torch.equal(int8_product.int8_product(x, values, scales, added), made.to(HALF))
    wide, exact = x.double(), values.double() * scales.double()[:, None]
    coarse = (wide / row_scales(wide)).round() * row_scales(wide)
    wanted = torch.nn.functional.linear(wide, exact, None if added is None else added.double())
    error, coarse_error = (made.double() - wanted).norm(), ((wide - coarse) @ exact.T).norm()
    assert error < 1e-3 * wanted.norm() and error < coarse_error / 100


@both
def test_weights_in_eight_bits_are_close(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 64, dtype=dtype), torch.randn(20, 64, dtype=dtype), torch.randn(20, dtype=dtype)
    weight[0] *= 1000
    weight[1] = 0
    small = EightBitWeight(weight, bias)
    assert small.values.dtype == torch.int8 and (len(small), small.shape) == (20, (20, 64))
    made, wanted = small(x), torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert made.dtype == dtype
    error = (made.double() - wanted).norm(dim=0) / wanted.norm(dim=0)
    assert float(error.max()) < 0.02 and torch.equal(made[:, 1], bias[1].expand(3))


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    keys, values = make_cache(2, 600, 16, 0, torch.float32, "cpu")
    none, queries = torch.zeros(3, dtype=torch.long), torch.randn(3, 4, 16)
    made = path_attention(queries, keys, values, torch.tensor([500]), none, torch.zeros(3, 3, dtype=torch.int32))
    assert torch.equal(made, torch.zeros(3, 4, 16))


@both
@pytest.mark.parametrize(
    ("n", "heads", "shared", "width", "length", "capacity"),
    [(1, 3, 1, 16, 5, 64), (12, 6, 2, 32, 0, 96), (7, 6, 2, 24, 130, 200), (9, 3, 1, 16, 511, 700)],
)
def test_attention(n: int, heads: int, shared: int, width: int, length: int, capacity: int, dtype: torch.dtype) -> None:
    check_attention(n, heads, shared, width, length, capacity, dtype)


@both
@pytest.mark.parametrize(
    ("n", "length", "capacity", "window"),
    [(7, 40, 64, 3), (12, 0, 96, 1), (12, 130, 200, 64), (9, 511, 700, 130), (9, 511, 700, 600), (5, 20, 700, 700)],
)
def test_attention_in_a_window(n: int, length: int, capacity: int, window: int, dtype: torch.dtype) -> None:
    check_window(n, length, capacity, window, dtype)


@both
def test_a_chain_is_decoding_step_by_step(dtype: torch.dtype) -> None:
    check_chain(3, 16, 127, 520, dtype)


def test_attention_takes_scale_and_out_and_padding() -> None:
    keys, values = make_cache(1, 40, 16, 13, torch.float32, "cpu")
    queries, out = torch.randn(3, 2, 16), torch.full((3, 4, 16), 7.0)
    mask = torch.tensor([[True, False, False], [True, True, False], [False, False, False]])  # the last row is padding
    length = torch.tensor([10], dtype=torch.int32)
    made = tree_attention(queries, keys, values, length, mask, scale=0.5, out=out[:, ::2])
    scores = queries.transpose(0, 1) @ keys[:, :13].transpose(1, 2) * 0.5
    seen = torch.cat([torch.ones(3, 10, dtype=torch.bool), mask], 1)
    wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values[:, :13]
    torch.testing.assert_close(made, wanted.transpose(0, 1), atol=1e-6, rtol=1e-6)
    assert out[:, 0].data_ptr() == made.data_ptr() and (out[:, 1::2] == 7).all()


@pytest.mark.parametrize(("count", "width"), [(4, 700), (9, 30), (2, 1500)])
def test_the_noise_of_the_positions_ahead(count: int, width: int) -> None:
    check_noise(count, width)


@both
@pytest.mark.parametrize(("n", "vocabulary", "temperature"), [(1, 5, 1.0), (2, 2500, 0.7), (2, 1024, 0.0)])
def test_draw(n: int, vocabulary: int, temperature: float, dtype: torch.dtype) -> None:
    check_draw(n, vocabulary, dtype, temperature)


def test_draw_among_scores_that_are_almost_equal() -> None:
    check_close_draws(3, 1500)


@both
@pytest.mark.parametrize(
    ("w", "k", "columns", "dice", "named"),
    [
        (3, 4, 700, False, False),
        (2, 32, 2100, True, True),
        (1, 1, 5, True, False),
        (2, 5, 515, False, True),
        (2, 70, 6100, False, True),
        (1, 100, 5000, True, False),
        (2, 40, 41, False, False),
    ],
)
def test_top_children(w: int, k: int, columns: int, dice: bool, named: bool, dtype: torch.dtype) -> None:
    check_top(w, k, columns, dtype, dice, named)


@pytest.mark.parametrize(
    ("w", "k", "columns", "width", "dice", "bias"),
    [
        (3, 4, 512, 64, False, False),
        (16, 10, 256, 128, True, True),
        (1, 1, 128, 64, True, False),
        (8, 64, 4096, 64, False, True),
    ],
)
def test_lazy_logits(w: int, k: int, columns: int, width: int, dice: bool, bias: bool) -> None:
    check_lazy_logits(w, k, columns, width, dice, bias)


@both
def test_ties_go_to_the_lower_column(dtype: torch.dtype) -> None:
    logits = torch.tensor([1.0, 0.0, -0.0, 2.0, -1.0, -torch.inf, 2.0, 0.0], dtype=dtype).repeat(100)[None]
    values, names = top_children(logits, 16)
    assert names[0].tolist() == sorted(names[0].tolist()) and (logits[0, names[0]] == 2).all()
    values, names = top_children(torch.tensor([[0.0, -0.0, -torch.inf, 0.0, -5.0]], dtype=dtype), 5)
    assert names[0].tolist() == [0, 1, 3, 4, 2] and values[0, 4] == -torch.inf
    below = -torch.rand(2, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted, order = below.float().log_softmax(-1).sort(descending=True, stable=True)
    values, names = top_children(below, 9)
    assert torch.equal(names, order[:, :9])
    torch.testing.assert_close(values, wanted[:, :9])
    few = torch.randint(-3, 4, (3, 1500)).to(dtype)
    few[1, 100:], few[2] = -torch.inf, -2
    wanted, order = few.float().log_softmax(-1).sort(descending=True, stable=True)
    for k in (33, 128):
        values, names = top_children(few, k)
        assert torch.equal(names, order[:, :k])
        torch.testing.assert_close(values, wanted[:, :k])


@both
@pytest.mark.parametrize(("n", "width"), [(1, 64), (3, 576), (2, 700)])
def test_norm_and_gate(n: int, width: int, dtype: torch.dtype) -> None:
    check_norm(n, width, dtype)


@both
@pytest.mark.parametrize(("n", "heads", "shared", "width"), [(1, 3, 1, 16), (5, 4, 2, 24)])
def test_rotate_and_store(n: int, heads: int, shared: int, width: int, dtype: torch.dtype) -> None:
    check_rotation(n, heads, shared, width, dtype)


@both
@pytest.mark.parametrize(("n", "width"), [(1, 64), (2, 700)])
def test_kinds_of_norms_and_gates(n: int, width: int, dtype: torch.dtype) -> None:
    check_norm_kinds(n, width, dtype)
    check_gelu_and_cap(n, width, dtype)


@both
@pytest.mark.parametrize(("n", "heads", "shared", "width"), [(2, 4, 2, 16), (1, 3, 1, 24)])
def test_norms_of_heads(n: int, heads: int, shared: int, width: int, dtype: torch.dtype) -> None:
    check_head_norms(n, heads, shared, width, dtype)


@both
@pytest.mark.parametrize(("n", "heads", "shared", "width", "rotated"), [(1, 3, 1, 16, 8), (3, 4, 2, 32, 24)])
def test_partial_rotation(n: int, heads: int, shared: int, width: int, rotated: int, dtype: torch.dtype) -> None:
    check_partial_rotation(n, heads, shared, width, rotated, dtype)


@pytest.mark.parametrize(
    ("n", "width", "inner", "heads", "shared", "d"),
    [(1, 64, 48, 2, 1, 32), (5, 100, 64, 3, 1, 16), (35, 80, 32, 2, 2, 16)],
)
def test_into_a_layer(n: int, width: int, inner: int, heads: int, shared: int, d: int) -> None:
    check_enter(n, width, inner, heads, shared, d)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_small_products_fit() -> None:
    from windfall.kernels.triton.product import MAX_PROGRAMS, MAX_ROWS, ROWS, choose_tiling

    for rows in (1, 16, 17, 64):
        for columns, k in ((3072, 576), (960, 576), (5120, 960), (1600, 960), (48, 64)):
            tiling = choose_tiling(rows, columns, k, 232_448)
            if tiling is not None:
                assert columns // tiling.outputs * -(-rows // ROWS) <= MAX_PROGRAMS and columns % tiling.outputs == 0
                assert tiling.first <= k <= tiling.first + tiling.rest
    assert (
        choose_tiling(MAX_ROWS, 3072, 576, 232_448) is not None and choose_tiling(MAX_ROWS, 3072, 576, 101_376) is None
    )  # a smaller GPU
    assert (
        choose_tiling(MAX_ROWS, 960, 2560, 232_448) is None and choose_tiling(1, 576, 3584, 232_448) is None
    )  # with their rows
    assert choose_tiling(MAX_ROWS + 1, 3072, 576, 232_448) is None and choose_tiling(1, 28_672, 4096, 232_448) is None


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton")
def test_segments_have_programs_of_their_own_if_there_are_few_tiles() -> None:
    from windfall.kernels.triton.matmul import splits

    assert splits(24, 4) and splits(64, 2)
    assert not splits(96, 2) and not splits(24, 1)


@pytest.mark.parametrize(
    ("candidates", "rank", "parts", "hidden", "owned"),
    [
        (16, 8, 1, True, True),
        (5, 12, 1, False, False),
        (20, 4, 1, True, False),
        (7, 4, 0, False, False),
        (9, 12, 2, True, True),
        (16, 20, 3, True, True),
        (5, 80, 3, True, False),
    ],
)
def test_children_with_pair_scores(candidates: int, rank: int, parts: int, hidden: bool, owned: bool) -> None:
    check_pair_children(candidates, rank, parts, hidden, owned)


def test_the_first_node_of_a_path_carries_nothing() -> None:
    check_pair_children(6, 12, 3, True, True, path=False)


@pytest.mark.parametrize(
    ("rule", "parts", "noisy", "batch", "width", "candidates"),
    [
        (Rule(), 1, False, 0, 6, 8),  # more rows than the root has children
        (Rule(calibrated=True), 1, True, 2, 3, 64),
        (Rule(whole=True), 0, False, 0, 3, 4),
        (Rule(top=9), 2, False, 2, 3, 5),
        (Rule(), 3, True, 2, 3, 8),
        (Rule(budget=12, share=-2.0, first=2, levels=1), 1, True, 0, 3, 8),
    ],
)
def test_all_levels_at_once(rule: Rule, parts: int, noisy: bool, batch: int, width: int, candidates: int) -> None:
    check_levels(rule, parts, noisy, batch, width, candidates)
