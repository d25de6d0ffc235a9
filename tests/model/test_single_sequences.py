"""Passes without transformers' check for packed sequences give the same states, and the check is put back."""

from __future__ import annotations

import contextlib

import pytest
import torch
from transformers import masking_utils

from helpers.tiny import FAMILIES, prompt, tiny
from windfall.model.single_sequences import CHECK, single_sequences


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_states_stay_the_same(family: str) -> None:
    model, tokens = tiny(family), torch.tensor([prompt(20, seed) for seed in range(2)])
    before = model(tokens, use_cache=False).logits
    with single_sequences():
        after = model(tokens, use_cache=False).logits
    assert torch.equal(before, after)


def test_the_check_is_put_back() -> None:
    check, positions = getattr(masking_utils, CHECK), torch.tensor([[0, 1, 0, 1]])  # two sequences in a row
    with contextlib.suppress(KeyboardInterrupt), single_sequences():
        with single_sequences():
            assert getattr(masking_utils, CHECK)(positions) is None
        assert getattr(masking_utils, CHECK)(positions) is None
        raise KeyboardInterrupt
    assert getattr(masking_utils, CHECK) is check and check(positions).tolist() == [[0, 0, 1, 1]]
