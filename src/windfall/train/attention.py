"""Attention of drafting over whole texts: every row sees the text up to its own column, and a few rows of its own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.heads.layers import masked_attention, within

aten = torch.ops.aten


class Chains:
    """The memory of texts that a head drafts on from every column at once, pass by pass.

    The first pass is the text; in each later one, column t goes on from column t of the pass before.
    """

    def __init__(self, windows: tuple[int | None, ...] = ()) -> None:
        self._windows = windows  # of each layer
        self._text: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries [B, heads, L, d], keys and values [B, kv_heads, L, d] → [B, heads, L, d]."""
        if torch.is_autocast_enabled(queries.device.type):
            dtype = torch.get_autocast_dtype(queries.device.type)
            queries, keys, values = (x.to(dtype) for x in (queries, keys, values))
        own = self._own.setdefault(layer, [])
        if layer in self._text:
            own.append((keys, values))
        else:
            groups = queries.shape[1] // keys.shape[1]
            self._text[layer] = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        return self.look(queries, self._text[layer], own, self._windows[layer] if self._windows else None)

    def look(
        self, queries: Tensor, text: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], window: int | None
    ) -> Tensor:
        """`text`: as many heads as the queries have; `own`: later passes, fewer heads."""
        if window is not None and window < queries.shape[2] + len(own):
            return _masked(queries, text, own, window)
        if not own:
            return F.scaled_dot_product_attention(queries, *text, is_causal=True)
        if not _fused(queries):
            return _masked(queries, text, own, None)
        chain = (torch.stack(parts, 3) for parts in zip(*own, strict=True))  # [B, kv_heads, L, passes, d]
        out: Tensor = _TextAndChain.apply(queries, *text, *chain)  # type: ignore[no-untyped-call]
        return out


class _TextAndChain(torch.autograd.Function):
    """One softmax over the text (a fused causal kernel) and the chain (a handful of keys for each row).

    A fused backward kernel needs nothing of the softmax but its output and the logarithm of its sum. Given those of the
    whole softmax, it returns the text's share of the gradients as they are.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor
    ) -> Tensor:
        out, logsum, state = _causal(queries, keys, values)
        grouped = _grouped(queries, own_keys)  # [B, kv_heads, L, group, d]
        scores = (grouped @ own_keys.mT).float() / math.sqrt(queries.shape[-1])  # [B, kv_heads, L, group, passes]
        text = _grouped(logsum[..., None], own_keys)  # [B, kv_heads, L, group, 1]
        total = torch.cat([text, scores], -1).logsumexp(-1, keepdim=True)
        mixed = _grouped(out, own_keys) * (text - total).exp() + (scores - total).exp() @ own_values.float()
        out, logsum = _flat(mixed).to(queries.dtype), _flat(total).squeeze(-1)
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, out, logsum, *state)
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, ...]:
        queries, keys, values, own_keys, own_values, out, logsum, *state = ctx.saved_tensors
        by_query, by_key, by_value = _causal_backward(given, queries, keys, values, out, logsum, state)
        scale = 1 / math.sqrt(queries.shape[-1])
        grouped, slope, total = (_grouped(x, own_keys) for x in (queries, given, logsum[..., None]))
        level = (slope.float() * _grouped(out, own_keys).float()).sum(-1, keepdim=True)
        chances = ((grouped @ own_keys.mT).float() * scale - total).exp()  # [B, kv_heads, L, group, passes]
        inner = (chances * ((slope @ own_values.mT).float() - level) * scale).to(queries.dtype)
        own = inner.mT @ grouped, chances.to(queries.dtype).mT @ slope
        return by_query + _flat(inner @ own_keys), by_key, by_value, *own


def _grouped(x: Tensor, own: Tensor) -> Tensor:
    """[B, heads, L, d] → [B, kv_heads, L, group, d], by the heads of `own`."""
    return x.reshape(len(x), own.shape[1], -1, *x.shape[2:]).transpose(2, 3)


def _flat(x: Tensor) -> Tensor:
    return x.transpose(2, 3).flatten(1, 2)


def _causal(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output, the logarithm of each row's sum [B, heads, L], and what the way back needs beside them."""
    rows = queries, keys, values
    if not queries.is_cuda:
        out, logsum = aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, True)
        return out, logsum, []
    if _flashes(queries):
        out, logsum, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(*rows, 0.0, True)
        return out, logsum, [seed, offset]
    out, logsum, seed, offset = aten._scaled_dot_product_efficient_attention(*rows, None, True, 0.0, True)
    return out, logsum[..., : queries.shape[2]], [seed, offset]


def _causal_backward(
    given: Tensor, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, logsum: Tensor, state: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    rows, length = (given, queries, keys, values), queries.shape[2]
    if not queries.is_cuda:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = backward(*rows, out, logsum, 0.0, True)
    elif _flashes(queries):
        backward = aten._scaled_dot_product_flash_attention_backward
        found = backward(*rows, out, logsum.contiguous(), None, None, length, length, 0.0, True, *state)
    else:
        logsum = F.pad(logsum, (0, -length % 32), value=torch.inf).contiguous()  # as that kernel leaves it
        backward = aten._scaled_dot_product_efficient_attention_backward
        found = backward(*rows, None, out, logsum, *state, 0.0, [True, True, True, False], True)
    return found[0], found[1], found[2]


def _fused(queries: Tensor) -> bool:
    """Whether one of these kernels takes such rows."""
    if not queries.is_cuda:
        return queries.device.type == "cpu" and queries.dtype != torch.float64
    return _flashes(queries) or (queries.dtype == torch.float32 and queries.shape[-1] % 4 == 0)


def _flashes(queries: Tensor) -> bool:
    half, size = queries.dtype in (torch.bfloat16, torch.float16), queries.shape[-1]
    return half and size % 8 == 0 and size <= 256 and torch.cuda.get_device_capability(queries.device) >= (8, 0)


def _masked(
    queries: Tensor, text: tuple[Tensor, Tensor], own: list[tuple[Tensor, Tensor]], window: int | None
) -> Tensor:
    """The same by an explicit mask, for what no such kernel takes."""
    groups = queries.shape[1]
    rows = [text, *((x.repeat_interleave(groups // x.shape[1], 1) for x in pair) for pair in own)]
    keys, values = (torch.cat(parts, 2) for parts in zip(*rows, strict=True))
    return masked_attention(queries, keys, values, sight_of_chains(queries, len(own), window)[None])


def sight_of_chains(queries: Tensor, later: int, window: int | None) -> Tensor:
    """What the rows of the newest of `later` passes after the text see: the text up to their columns, and their own
    chains; of both, positions less than `window` before their own. → [L, (1 + later) * L] bool."""
    count, device = queries.shape[2], queries.device
    places = torch.arange(count, device=device)
    past = places <= places[:, None]
    alone = torch.eye(count, dtype=torch.bool, device=device)
    mask = torch.cat([past, *[alone] * later], -1)
    columns = torch.cat([places + step for step in range(later + 1)])  # positions
    return within(mask, places[:, None] + later - columns, window)
