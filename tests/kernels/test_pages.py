"""Attention over pages, as torch computes it and under Triton's interpreter; tests/gpu runs it on a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from helpers.interpreter import HALF
from helpers.paged import check_pages
from windfall.kernels import attention
from windfall.kernels.pages import max_tiles, tiles_of

KERNEL = "windfall.kernels.triton.path_attention"


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    _set_programs(monkeypatch, 6)  # each takes long here


def _set_programs(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Compute tiles in about this number of programs."""
    monkeypatch.setattr(f"{KERNEL}.BATCH_TILE_PROGRAMS", programs)
    monkeypatch.setattr(f"{KERNEL}.BATCH_TREE_PROGRAMS", programs)


@pytest.mark.parametrize(
    ("memory", "widest", "widest_in_fp32"),
    [(232_448, 512, 512), (166_912, 256, 256), (101_376, 128, 256)],  # of H100 and H200, A100, and GeForce
)
def test_wide_heads_need_memory(memory: int, widest: int, widest_in_fp32: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "shared_memory", lambda device: memory)
    for dtype, most in ((torch.bfloat16, widest), (torch.float32, widest_in_fp32)):
        widths = [128, 256, 512, 576]
        fits = [attention.fits_pages(width, 4, dtype, torch.device("cuda")) for width in widths]
        assert fits == [width <= most for width in widths]
        assert attention.fits_pages(576, 4, dtype, torch.device("cpu"))


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(
    ("lengths", "rows", "dtype"),
    [
        ([5, 130, 0, 63], [1, 4, 3, 1], HALF),
        ([70], [3], HALF),
        ([3, 40], [1, 2], torch.float32),
    ],
)
def test_a_row_has_the_same_bits_in_a_batch(
    lengths: list[int], rows: list[int], trees: bool, dtype: torch.dtype
) -> None:
    check_pages(lengths, rows, trees, dtype)


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_programs_that_share_the_parts_of_a_tile(trees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_programs(monkeypatch, 24)
    check_pages([130, 200, 5], [4, 2, 1], trees, HALF)


@pytest.mark.parametrize("fused", [False, True], ids=["rows apart", "fused"])
def test_programs_with_rows_of_several_paths_and_requests(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has up to sixteen rows, each with one query."""
    monkeypatch.setattr(f"{KERNEL}.FUSED_ROWS", fused)
    monkeypatch.setattr(f"{KERNEL}.BATCH_ROW_PROGRAMS", 4)
    check_pages([70, 3, 130], [17, 9, 2], True, HALF, heads=2)


def test_far_parts() -> None:
    check_pages([1100, 30], [2, 1], True, HALF)


def test_trees_in_the_pages_of_their_requests() -> None:
    """Their rows lie after the committed ones, in a page that both share or in pages of their own."""
    check_pages([70, 3, 62, 128], [17, 9, 5, 1], True, HALF, staged=False)


@pytest.mark.parametrize("programs", [6, 24])
def test_prompts_beside_trees(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_programs(monkeypatch, programs)
    check_pages([70, 0, 60], [3, 4, 7], True, HALF, prompts=(1, 2))


def test_windows() -> None:
    check_pages([100, 20], [1, 3], True, HALF, window=37)


def test_chunks() -> None:
    """Rows of a request begin in one chunk and end in the next."""
    check_pages([100, 20], [1, 5], True, HALF, window=22, chunked=True)


@pytest.mark.parametrize("seed", range(5))
def test_tiles_have_rows_of_one_request(seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 9, (6,), generator=chance)
    owners = torch.repeat_interleave(torch.randperm(6, generator=chance), sizes)
    tiles = tiles_of(owners, 3, max_tiles(len(owners), 6, 3)).tolist()
    made = [owners[start:end].tolist() for start, end in pairwise(tiles)]
    assert [owner for tile in made for owner in tile] == owners.tolist()
    assert all(len(set(tile)) <= 1 and len(tile) <= 3 for tile in made)
    assert len([tile for tile in made if tile]) == sum(-(-size // 3) for size in sizes.tolist())
