"""Attention of many blocks at once: packed, dense and one block alone give the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from helpers.random_heads import BLOCKS, WIDTH, random_block
from helpers.tiny import VOCABULARY, tiny
from windfall.heads.block import BlockHead, Visibility
from windfall.heads.fitting import fit
from windfall.heads.layers import ContextMemory, Unrolled
from windfall.model.target import Target
from windfall.train.block_memory import (
    TILE,
    Blocks,
    DenseBlocks,
    PackedBlocks,
    PaddedSizes,
    new_memory,
    packed_mask,
    round_up,
)

LENGTH = 70


def blocks_of(texts: Tensor, starts: Tensor) -> Blocks:
    return Blocks(texts, starts, torch.bincount(texts).tolist())


BATCH = blocks_of(torch.tensor([0] * 40 + [2] * 3), torch.tensor([*range(2, 42), 1, 33, 69]))  # no block of text 1


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny())


def run(head: BlockHead, features: Tensor, anchors: Tensor, blocks: Blocks, memory: ContextMemory) -> Tensor:
    positions = torch.arange(features.shape[1]).expand(len(features), -1)
    head.remember(head.context(features), positions, memory)
    states: Tensor = head(anchors, blocks.positions(head.config.block), memory)
    return states


@torch.no_grad()
@pytest.mark.parametrize("name", BLOCKS)
def test_packed_and_dense_blocks_are_those_of_decoding(name: str, target: Target) -> None:
    head = fit(random_block(name), target)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(3, LENGTH, len(head.config.taps) * WIDTH, generator=generator)
    anchors = torch.randint(VOCABULARY, (len(BATCH.texts),), generator=generator)
    dense = run(head, features, anchors, BATCH, DenseBlocks(head.config, BATCH))
    packed = run(head, features, anchors, BATCH, PackedBlocks(head.config, BATCH, PaddedSizes()))
    close = {"rtol": 1e-4, "atol": 1e-5 * float(dense.abs().max())}
    torch.testing.assert_close(packed, dense, **close)
    if head.config.windows or head.config.causal_layers:
        return  # `Unrolled` below has one mask for all layers
    for place in (0, 35, 40, 42):
        text, start = int(BATCH.texts[place]), int(BATCH.starts[place])
        memory = Unrolled()
        if not head.config.flag("bidirectional"):
            seen = torch.ones(head.config.block, start + head.config.block, dtype=torch.bool)
            memory.mask = seen.tril(start)[None]
        one = blocks_of(BATCH.texts[place : place + 1], BATCH.starts[place : place + 1])
        alone = run(head, features[text : text + 1, :start], anchors[place : place + 1], one, memory)
        torch.testing.assert_close(dense[place], alone[0], **close)


@pytest.mark.parametrize(
    "visible", [Visibility(), Visibility(None, True), Visibility(9), Visibility(4, True), Visibility(9, False, True)]
)
@pytest.mark.parametrize("rows", [5, 8])
def test_the_tiles_of_a_mask_hold_all_that_rows_see(visible: Visibility, rows: int) -> None:
    """Against torch's own way, which looks at every row and column."""
    texts = torch.tensor([0] * 60 + [1] * 30 + [3] * 2)
    starts = torch.tensor([*range(300, 360), *range(1, 31), 5, 399])
    blocks, sizes = blocks_of(texts, starts), (round_up(4 * 400), round_up(len(texts) * rows))
    ours = packed_mask(blocks, 400, rows, sizes, visible)
    slow = create_block_mask(ours.mask_mod, None, None, sizes[1], sum(sizes), device="cpu")
    wanted = slow.to_dense()[0, 0].bool()
    found = ours.to_dense()[0, 0].bool()
    assert bool((found | ~wanted).all()) and int(found.sum()) <= 1.5 * int(wanted.sum())
    whole = torch.zeros_like(found)
    for row, count in enumerate(ours.full_kv_num_blocks[0, 0].tolist()):
        whole[row, ours.full_kv_indices[0, 0, row, :count].long()] = True
    seen = ours.mask_mod(0, 0, torch.arange(sizes[1])[:, None], torch.arange(sum(sizes)))
    tiled = seen.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE))
    assert bool(tiled.any(3).any(1).eq(wanted).all())
    assert bool((tiled.all(3).all(1) | ~whole).all())
    assert bool(seen.any(1).all())  # padding too, or its softmax would not be finite
    assert visible.window or whole.any()


def test_sizes_of_a_training_are_few() -> None:
    sizes = PaddedSizes(0.5)
    seen = {sizes.grow(columns, columns // 3, 8) for columns in (30000, 32000, 9000, 32768, 31000, 20)}
    assert seen == {(32768, 131072)}
    assert sizes.grow(40, 20000, 8) == (32768, 163840)
    for size in range(1, 9000, 7):
        assert round_up(size) % TILE == 0 and size <= round_up(size) < 1.25 * size + TILE


def test_blocks_on_a_cpu_have_dense_masks() -> None:
    assert isinstance(new_memory(random_block("block").config, BATCH, PaddedSizes()), DenseBlocks)


@torch.no_grad()
def test_batches_of_the_same_padded_size_share_a_compiled_kernel() -> None:
    counter, sizes = CompileCounterWithBackend("eager"), PaddedSizes(0.5)
    attention = torch.compile(flex_attention, backend=counter, fullgraph=True, dynamic=False)
    for texts, length, blocks in ((4, 60, 20), (3, 70, 20), (2, 100, 30), (7, 60, 20)):
        given = blocks_of(torch.arange(texts).repeat_interleave(blocks), torch.arange(2, 2 + blocks).repeat(texts))
        columns, rows = sizes.grow(texts * length, len(given.texts), 8)
        mask = packed_mask(given, length, 8, (columns, rows), Visibility())
        queries, keys, values = torch.randn(1, 4, rows, 16), *torch.randn(2, 1, 2, columns + rows, 16)
        found = attention(queries, keys, values, block_mask=mask, enable_gqa=True)
        torch.testing.assert_close(found, flex_attention(queries, keys, values, block_mask=mask, enable_gqa=True))
    assert counter.frame_count == 2
