"""Unrolled drafting computes what decoding computes, with the gradients of an explicit softmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.random_heads import KINDS, WINDOWED
from helpers.teaching import drafted, same, teach
from windfall.heads.layers import masked_attention
from windfall.train.unroll import ChainMemory, unroll


@pytest.mark.parametrize("kind", [*KINDS, *WINDOWED])
def test_unrolled_rows_are_drafted_rows(kind: str) -> None:
    head, _, outputs = teach(kind)
    guesses = unroll(head, outputs, 4)
    for step, guess in enumerate(guesses):
        for column in (0, 3, 11):
            path = outputs.batch.tokens[1, column + 2 : column + 2 + step].tolist()
            alone = drafted(head, outputs, 1, column, path)
            same(guess.state[1, column], alone.state)
            same(guess.recycled[1, column], alone.recycled)


def chain_mask(columns: int, passes: int) -> Tensor:
    """The mask of a pass over the text and all later passes, its own included: [columns, passes * columns]."""
    eyes = [torch.eye(columns, dtype=torch.bool)] * (passes - 1)
    return torch.cat([torch.ones(columns, columns, dtype=torch.bool).tril(), *eyes], -1)


def test_columns_that_the_third_pass_attends_to() -> None:
    """Row 5 of 6 sees true features in columns 0 to 3, the first pass's in 4, and its own input, the second's, in 5."""
    columns, row, level, memory = 6, 5, 2, ChainMemory()
    names = torch.eye(3 * columns).unflatten(0, (3, columns))  # values that identify their columns
    for values in names:
        found = memory.attend(0, *(torch.randn(1, 1, columns, 3 * columns) for _ in range(2)), values[None, None])
    third = found[0, 0, row - level].unflatten(0, (3, columns))  # by level, the column of the key's own chain
    rows = [[column + own for column in third[own].nonzero().flatten().tolist()] for own in range(3)]
    assert rows == [[0, 1, 2, 3], [4], [5]]


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "texts", "size"),
    [(torch.float32, 2, 8), (torch.float32, 1, 7), (torch.float64, 2, 8)],
    ids=["fused", "odd", "masked"],
)
def test_chain_attention_equals_masked_attention(dtype: torch.dtype, texts: int, size: int, shared: int) -> None:
    """Output and gradients of four passes, against one softmax under an explicit mask."""
    torch.manual_seed(0)
    passes, columns, memory = 4, 37, ChainMemory()
    queries, keys, values = (
        [torch.randn(texts, heads, columns, size, dtype=dtype, requires_grad=True) for _ in range(passes)]
        for heads in (6, 6 // shared, 6 // shared)
    )
    ours = [memory.attend(0, *rows) for rows in zip(queries, keys, values, strict=True)]
    plain = []
    for count, own in enumerate(queries, 1):
        seen = torch.cat(keys[:count], 2), torch.cat(values[:count], 2)
        plain.append(masked_attention(own, *seen, chain_mask(columns, count)[None]))
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    slopes = [torch.randn_like(out) for out in plain]
    learning = [*queries, *keys, *values]
    found, wanted = (torch.autograd.grad(out, learning, slopes) for out in (ours, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_detach_stops_gradients_between_passes() -> None:
    head, _, outputs = teach("eagle")
    for detach in (True, False):
        guesses = unroll(head, outputs, 3, detach)
        [slope] = torch.autograd.grad(guesses[2].state.sum(), guesses[0].recycled, allow_unused=True)
        assert (slope is None) == detach
