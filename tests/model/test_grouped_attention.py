"""Attention with grouped heads gives what repeated keys and values give, and only where it is meant to be used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from helpers.tiny import prompt, tiny
from windfall.model import grouped_attention as module
from windfall.model.grouped_attention import grouped_attention, grouped_sdpa

CPU = torch.device("cpu")


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("masked", [True, False])
def test_it_is_attention_with_repeated_keys(groups: int, masked: bool) -> None:
    queries, keys, values = some(2, 2 * groups, 4, 8), some(2, 2, 9, 8), some(2, 2, 9, 5)
    mask = some(2, 1, 4, 9) > -0.5 if masked else None
    repeated = (each.repeat_interleave(groups, 1) for each in (keys, values))
    wanted = F.scaled_dot_product_attention(queries, *repeated, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(grouped_attention(queries, keys, values, mask, 0.3), wanted)


def test_a_model_computes_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny(num_attention_heads=4, num_key_value_heads=2), 0
    tokens, mask = torch.tensor([prompt(6)]), torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    mask[0, 0, 5, 4] = False  # not a chain

    def counted(*given: torch.Tensor | float | None) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return grouped_attention(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "grouped_attention", counted)
    wanted = model(tokens, attention_mask=mask).logits
    with grouped_sdpa(CPU):
        found = model(tokens, attention_mask=mask).logits
    assert calls == model.config.num_hidden_layers
    torch.testing.assert_close(found, wanted)


def test_other_calls_go_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(module, "_theirs", lambda: lambda *_, **options: given.append(options))
    query, key, mask = some(1, 4, 3, 8), some(1, 2, 7, 8), torch.ones(1, 1, 3, 7, dtype=torch.bool)
    layer = torch.nn.Module()
    module._sdpa(layer, query, key, key, None, scaling=0.5, is_causal=True)
    module._sdpa(layer, query[:, :, :1], key, key, mask[:, :, :1])
    module._sdpa(layer, key, key, key, mask)
    module._sdpa(layer, query, key, key, mask.repeat(1, 4, 1, 1))
    module._sdpa(layer, query, key, key, mask[:, :, :1])
    module._sdpa(layer, query, key, key, mask, softcap=30.0)
    assert len(given) == 6 and given[0] == {"dropout": 0.0, "scaling": 0.5, "is_causal": True}


def test_transformers_function_is_back_after_the_block() -> None:
    with grouped_sdpa(CPU):
        with grouped_sdpa(CPU):
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is module._sdpa
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is module._sdpa
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    with grouped_sdpa(torch.device("cuda")):
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
