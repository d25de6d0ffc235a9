"""New block heads: which weights they start from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.tiny import VOCABULARY, tiny
from windfall.core.errors import InputError
from windfall.heads.block import BlockHead
from windfall.model.target import Target
from windfall.train.new_block import PAIRS, check_shape, new_block
from windfall.train.target_layers import spread_layers


@pytest.mark.parametrize("pair", PAIRS)
def test_a_new_pair_score_is_zero(pair: str) -> None:
    target = Target(tiny())
    head = new_block(target, {"pair": pair, "rank": 5, "vocabulary": torch.arange(0, VOCABULARY, 2)})
    assert head.training and head.config.block == 8 and len(head.layers) == 3
    if pair == "none":
        assert head.pair is None
        return
    drafted = torch.arange(31)
    query, _ = head.pair.query(torch.arange(VOCABULARY), torch.randn(VOCABULARY, 32))
    keys = head.pair.keys(drafted)
    assert query.shape == (VOCABULARY, 5) and bool(query.any()) and not (query @ keys.T).any()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_layers_start_as_the_targets(family: str) -> None:
    target = Target(tiny(family, num_hidden_layers=8))
    head = new_block(target, {"layers": 4, "conv": 2})
    given = target.model.base_model.state_dict()
    chosen = spread_layers(4, 8)
    assert chosen == [0, 2, 3, 5]
    for place, layer in enumerate(chosen):
        for name, tensor in head.layers[place].state_dict().items():
            if "_conv." not in name:
                assert torch.equal(tensor, given[f"layers.{layer}.{name}"]), name
    torch.testing.assert_close(head.mask.data, target.model.get_input_embeddings().weight.mean(0))
    assert torch.equal(head.norm.weight, target.model.base_model.norm.weight)


def test_narrow_layers_keep_neurons_and_other_families_start_at_random() -> None:
    target = Target(tiny())
    head = new_block(target, {"intermediate": 7, "layers": 2})
    [gate, original] = [m.layers[0].mlp.gate_proj.weight for m in (head, target.model.base_model)]
    assert gate.shape == (7, 32) and all(bool((row == original).all(1).any()) for row in gate)
    with pytest.raises(InputError, match="--intermediate must be between 1 and 48"):
        new_block(target, {"intermediate": 49})
    for family in ("gemma", "olmo2", "gpt2"):
        other = new_block(Target(tiny(family)), {})
        assert isinstance(other, BlockHead) and bool(other.layers[0].self_attn.q_proj.weight.any())


def test_spread_layers() -> None:
    assert spread_layers(3, 30) == [0, 14, 27] and spread_layers(2, 30) == [0, 27]
    assert spread_layers(5, 30) == [0, 7, 14, 20, 27] and spread_layers(3, 2) == [0, 0, 0]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"layers": 1}, "--layers must be between 2 and 5"),
        ({"layers": 6}, "--layers must be between 2 and 5"),
        ({"block": 1}, "--block must be between 2 and 64"),
        ({"rank": 0}, "--rank must be between 1 and 1024"),
        ({"conv": 1}, "--conv 1 would mix no rows"),
        ({"pair": "gated"}, "--pair must be one of projected, path, selector, markov, none"),
    ],
)
def test_impossible_shapes_are_refused(shape: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_shape(shape)
