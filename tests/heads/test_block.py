"""The network of block heads."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from helpers.blocks import run
from helpers.random_heads import BLOCKS, WIDTH, random_block
from helpers.tiny import VOCABULARY, tiny
from windfall.heads.block import BlockHead
from windfall.heads.fitting import fit
from windfall.model.target import Target

LENGTH, CLOSE = 9, 1e-5


@cache
def target() -> Target:
    return Target(tiny())


def text(taps: int) -> Tensor:
    return torch.randn(2, LENGTH, taps * WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_a_text_do_not_see_each_other(name: str) -> None:
    head = fit(random_block(name), target())
    features, starts = text(len(head.config.taps)), torch.tensor([[3, 6, 9], [1, 2, 5]])
    anchors, rows = torch.randint(VOCABULARY, (2, 3)), head.config.block
    together = run(head, features, anchors, starts, rows).unflatten(1, (3, rows))
    for place in range(3):
        for b in range(2):
            start = int(starts[b, place])
            alone = run(
                head, features[b : b + 1, :start], anchors[b : b + 1, place : place + 1], torch.tensor([[start]]), rows
            )
            assert (alone[0] - together[b, place]).abs().max() < CLOSE * alone.abs().max()


def test_rows_of_a_causal_block_do_not_depend_on_later_rows() -> None:
    features, anchors, starts = text(3), torch.tensor([[3], [5]]), torch.tensor([[4], [LENGTH]])
    for name, causal in (("block", True), ("block-conv", True), ("block-dflash", False)):
        head = fit(random_block(name), target())
        short, long = (run(head, features, anchors, starts, rows) for rows in (3, 5))
        assert bool((short - long[:, :3]).abs().max() < CLOSE * long.abs().max()) is causal, name


def test_a_new_convolution_and_a_new_pair_score_change_nothing() -> None:
    head = BlockHead(random_block("block-conv").config)
    conv, x = head.layers[0].attention_conv, torch.randn(2, 4, WIDTH)
    assert torch.equal(conv(x, lambda y: 2 * y), 2 * x)
    head = BlockHead(random_block("block").config)
    fit(head, target()).prepare()
    query, _ = head.pair.query(torch.arange(5), torch.randn(5, WIDTH))
    assert not (query * head.pair.keys(torch.arange(5))).any()


@pytest.mark.parametrize("name", ["block", "block-pruned", "block-path"])
def test_tables_are_what_training_computes(name: str) -> None:
    head = fit(random_block(name), target())
    previous, states = torch.arange(6), torch.randn(6, WIDTH)
    candidates = torch.tensor([0, 3, 7])
    direct = head.pair.query(previous, states)[0], head.pair.keys(candidates)
    head.prepare()
    assert head.pair.tables is not None
    for table, own in zip((head.pair.query(previous, states)[0], head.pair.keys(candidates)), direct, strict=True):
        torch.testing.assert_close(table, own)
    head.train()
    assert head.pair.tables is None  # the weights may change


def test_a_recurrent_pair_score_reads_the_row_of_a_silent_anchor() -> None:
    head = fit(random_block("block-rnn"), target())
    normed, anchors = torch.randn(2, head.config.block, WIDTH), torch.tensor([4, 5])
    assert head.config.first_row == 1 and head.config.depth == head.config.block - 1
    torch.testing.assert_close(head.first_carry(anchors, normed), head.pair.query(anchors, normed[:, 0])[1])
    assert fit(random_block("block-markov"), target()).first_carry(anchors, normed) is None


@pytest.mark.parametrize("name", ["block-rnn", "block-path"])
def test_a_recurrent_pair_score_depends_on_earlier_tokens_of_the_path(name: str) -> None:
    head = fit(random_block(name), target())
    states, tokens = torch.randn(2, 1, WIDTH), torch.tensor([[4], [5]])
    carries = [head.pair.query(own, states[0])[1] for own in tokens]
    one, other = (head.pair.query(torch.tensor([3]), states[1], carry)[0] for carry in carries)
    assert carries[0].shape == (1, head.config.rank) and not torch.allclose(one, other)
