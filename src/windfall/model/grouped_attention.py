"""Attention with fewer key heads than query heads, without copies of the keys and values.

With a mask, transformers repeats keys and values for every query head, which takes long on a CPU when the text is long.
Here the query heads of a key head become more rows of it instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windfall.model.while_used import WhileUsed

SPECIAL = ("softcap", "position_bias", "cache")  # arguments that transformers' function handles


def grouped_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """queries [B, H, n, D], keys and values [B, H / g, m, D], mask [B, 1, n, m] → [B, H, n, D]"""
    batch, heads, rows, width = queries.shape
    groups = heads // keys.shape[1]
    folded = queries.reshape(batch, keys.shape[1], groups * rows, width)
    repeated = mask if mask is None or groups == 1 else mask.repeat(1, 1, groups, 1)
    found = F.scaled_dot_product_attention(folded, keys, values, attn_mask=repeated, scale=scale)
    return found.reshape(batch, heads, rows, values.shape[-1])


@contextmanager
def grouped_sdpa(device: torch.device) -> Iterator[None]:
    """In this block, models on a CPU compute masked sdpa attention this way."""
    if device.type != "cpu":
        yield
        return
    with _replaced.block():
        yield


def _sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' function, except for trees in models with grouped heads."""
    rows = query.shape[2]
    usual = attention_mask is None or rows == 1 or attention_mask.shape[1:3] != (1, rows)
    if usual or dropout or query.shape[1] == key.shape[1] or any(options.get(name) is not None for name in SPECIAL):
        given: tuple[Any, ...] = module, query, key, value, attention_mask
        found: tuple[Tensor, None] = _theirs()(*given, dropout=dropout, scaling=scaling, **options)
        return found
    return grouped_attention(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def _theirs() -> Any:
    """transformers' function; its import takes long, unless a model has been loaded."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def _replace() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ALL_ATTENTION_FUNCTIONS["sdpa"] is _theirs():
        ALL_ATTENTION_FUNCTIONS["sdpa"] = _sdpa


def _restore() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if ALL_ATTENTION_FUNCTIONS["sdpa"] is _sdpa:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # what remains is transformers' function


_replaced = WhileUsed(_replace, _restore)
