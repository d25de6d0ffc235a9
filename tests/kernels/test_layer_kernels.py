"""Norms, gates and attention in C: right, and the same for a row in a tree as in a chain."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers.cpu_kernel import no_kernel
from windfall.checkpoints.find import cache_dir
from windfall.kernels.cpu_layers import LayerKernels, layer_kernels


@pytest.fixture(scope="module")
def kernels() -> LayerKernels:
    found = layer_kernels(cache_dir() / "kernels")
    if found is None:
        no_kernel()
    return found


def some(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(1, 16), (2, 3, 576)])
def test_norm(kernels: LayerKernels, shape: tuple[int, ...]) -> None:
    x, weight = 3 * some(*shape), some(shape[-1])
    wanted = F.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    torch.testing.assert_close(kernels.norm(x, weight, 1e-5).double(), wanted, rtol=2e-6, atol=1e-6)


def test_gate(kernels: LayerKernels) -> None:
    gate, up = torch.cat([torch.linspace(-120, 120, 4096), torch.linspace(-2, 2, 4096)]), some(8192)
    wanted = F.silu(gate.double()) * up.double()
    torch.testing.assert_close(kernels.gate_up(gate.clone(), up).double(), wanted, rtol=1e-6, atol=1e-7)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, n, d], cos and sin [B, n, d]"""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


@pytest.mark.parametrize(("batch", "rows", "start"), [(1, 1, 0), (1, 5, 0), (1, 6, 37), (3, 4, 20), (1, 1, 300)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(6, 2, 16), (4, 4, 64), (3, 1, 80)])
def test_attention(
    kernels: LayerKernels, batch: int, rows: int, start: int, masked: bool, heads: int, kv_heads: int, width: int
) -> None:
    queries, keys, values = (some(batch, rows, count * width) for count in (heads, kv_heads, kv_heads + 1))
    values = values[..., : kv_heads * width].contiguous()
    angles = 7 * some(batch, rows, width // 2)
    cos, sin = (torch.cat([turn, turn], -1) for turn in (angles.cos(), angles.sin()))
    cache = some(batch, kv_heads, 320, width), some(batch, kv_heads, 320, width + 1)[..., 1:].contiguous()
    mask = None
    if masked:
        mask = some(batch, 1, rows, start + rows) > 0
        mask |= torch.eye(rows, start + rows, dtype=torch.bool).roll(start, 1)
    seen = mask if masked else torch.ones(rows, start + rows).tril(start).bool()[None, None]

    def split(x: Tensor, count: int) -> Tensor:
        return x.view(batch, rows, count, width).transpose(1, 2)

    wanted_keys, wanted_values = cache[0].clone(), cache[1].clone()
    wanted_keys[:, :, start : start + rows] = rotated(split(keys, kv_heads), cos, sin)
    wanted_values[:, :, start : start + rows] = split(values, kv_heads)
    given = (each[:, :, : start + rows].double() for each in (wanted_keys, wanted_values))
    turned = rotated(split(queries, heads), cos, sin).double()
    wanted = F.scaled_dot_product_attention(turned, *given, seen, scale=0.3, enable_gqa=True)
    found = kernels.attention(queries.clone(), keys, values, cos, sin, cache, start, mask, 0.3)
    torch.testing.assert_close(found.double(), wanted.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cache[0], wanted_keys, rtol=1e-6, atol=1e-6)
    assert torch.equal(cache[1], wanted_values)


def test_a_row_of_a_tree_has_the_bits_of_a_chain(kernels: LayerKernels) -> None:
    start, heads, kv_heads, width = 21, 4, 2, 32
    path, others = 5, 40  # rows of the path, and of branches between them
    q, k, v = (some(1, path + others, count * width) for count in (heads, kv_heads, kv_heads))
    turns = torch.ones(1, path + others, width), torch.zeros(1, path + others, width)
    before = some(1, kv_heads, 128, width), some(1, kv_heads, 128, width) - 1
    places = torch.tensor([0, 7, 8, 30, 44])  # of the path in the tree
    mask = torch.zeros(path + others, start + path + others, dtype=torch.bool)
    mask[:, :start] = True
    mask[torch.arange(path + others), start + torch.arange(path + others)] = True
    for depth, place in enumerate(places):
        mask[place, start + places[: depth + 1]] = True

    def attended(chosen: Tensor, seen: Tensor | None) -> Tensor:
        rows = (each[:, chosen].contiguous() for each in (q, k, v, *turns))
        cache = before[0].clone(), before[1].clone()
        return kernels.attention(*rows, cache, start, seen, 1 / math.sqrt(width))

    tree = attended(torch.arange(path + others), mask[None, None].contiguous())
    assert torch.equal(tree[:, places], attended(places, None))


def test_the_number_of_threads_changes_nothing(kernels: LayerKernels) -> None:
    q, k, v, cos = some(1, 3, 96), some(1, 3, 32), some(1, 3, 32), some(1, 3, 32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            cache = some(1, 1, 16, 32), some(1, 1, 16, 32)
            found.append(kernels.attention(q.clone(), k, v, cos, cos, cache, 9, None, 0.2))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
