"""Unrolled drafting for training: from every column of a text, a head drafts several steps from its own features.

In step s, the features up to a column are the target's, and those of the s tokens after it are the head's own, exactly
as in decoding. The attention of all columns is computed together.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from windfall.heads.base import FeatureHead, Guess
from windfall.heads.layers import masked_attention, within
from windfall.train.coupling import TextRows
from windfall.train.teacher import TeacherOutput

aten = torch.ops.aten


def unroll(
    head: FeatureHead, outputs: TeacherOutput, steps: int, detach: bool = False, memory: ChainMemory | None = None
) -> list[Guess]:
    """Draft along the text: in step s, column t has read x[t+1+s] and predicts x[t+2+s].

    The last s columns of step s have no text left; their results are meaningless and must be masked.
    """
    tokens, memory, guesses = outputs.batch.tokens, memory or ChainMemory(head.config.windows), []
    hidden = head.fuse(outputs.features[:, :-1])
    positions = torch.arange(tokens.shape[1] - 1, device=tokens.device)[None]
    for step in range(steps):
        guess = head(tokens[:, 1:].roll(-step, 1), hidden, positions + step, memory)
        guesses.append(guess)
        hidden = guess.recycled.detach() if detach else guess.recycled
    return guesses


def by_row(steps: list[Tensor], outputs: TeacherOutput) -> Tensor:
    """Steps by column [B, columns, ..] → [S, N, ..] by answer row: step s predicted x[r+1] in column r-1-s."""
    return torch.stack([own.roll(1 + step, 1)[outputs.batch.rows] for step, own in enumerate(steps)])


def by_column(values: Tensor, outputs: TeacherOutput) -> Tensor:
    """The inverse of `by_row`: [S, N] by answer row → [S, B, columns]; 0 where there is no answer row."""
    batch = outputs.batch
    found = values.new_zeros(len(values), *batch.answered.shape)
    for step, own in enumerate(values):
        found[step][batch.rows] = own
        found[step] = found[step].roll(-1 - step, 1)
    return found


def text_rows(outputs: TeacherOutput) -> TextRows:
    """By answer row: the token that follows, and the temperature at which it was drawn."""
    batch = outputs.batch
    tokens = batch.tokens[:, 1:][batch.rows]
    if batch.temperatures is None:
        return TextRows(tokens, torch.zeros_like(tokens, dtype=torch.float32))
    return TextRows(tokens, batch.temperatures[batch.rows.texts])


def aligned(head: FeatureHead, guesses: list[Guess], outputs: TeacherOutput) -> tuple[Tensor, Tensor, Tensor]:
    """By answer row: the inputs of the head's vocabulary [S, N, H], the target's states [N, Ht], validity [S, N]."""
    rows = outputs.batch.rows
    valid = rows.places > torch.arange(len(guesses), device=rows.places.device)[:, None]
    return head.normed(by_row([guess.state for guess in guesses], outputs)), outputs.final[rows], valid


# ---- attention


class ChainMemory:
    """Keys and values of a text and of the draft steps from each of its columns.

    The first pass is the text. In each later pass, column t continues the chain of column t: it attends to the text up
    to its column and to its own chain.
    """

    def __init__(self, windows: tuple[int | None, ...] = ()) -> None:
        self._windows = windows  # of each layer
        self._text: dict[int, tuple[Tensor, Tensor]] = {}
        self._chains: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries [B, heads, L, d], keys and values [B, kv_heads, L, d] → [B, heads, L, d]."""
        if torch.is_autocast_enabled(queries.device.type):
            dtype = torch.get_autocast_dtype(queries.device.type)
            queries, keys, values = (x.to(dtype) for x in (queries, keys, values))
        chains = self._chains.setdefault(layer, [])
        if layer in self._text:
            chains.append((keys, values))
        else:
            groups = queries.shape[1] // keys.shape[1]
            self._text[layer] = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        return self.attention(queries, self._text[layer], chains, self._windows[layer] if self._windows else None)

    def attention(
        self, queries: Tensor, text: tuple[Tensor, Tensor], chains: list[tuple[Tensor, Tensor]], window: int | None
    ) -> Tensor:
        """`text` has as many heads as the queries; `chains`, the later passes, have kv_heads."""
        if window is not None and window < queries.shape[2] + len(chains):
            return _masked(queries, text, chains, window)
        if not chains:
            return F.scaled_dot_product_attention(queries, *text, is_causal=True)
        if not _has_fused_kernel(queries):
            return _masked(queries, text, chains, None)
        stacked = (torch.stack(parts, 3) for parts in zip(*chains, strict=True))  # [B, kv_heads, L, passes, d]
        out: Tensor = _TextAndChain.apply(queries, *text, *stacked)  # type: ignore[no-untyped-call]
        return out


class _TextAndChain(torch.autograd.Function):
    """One softmax over the text (by a fused causal kernel) and the chain (a few keys for each row).

    A fused backward kernel needs only the output and the log-sum-exp of the softmax. Given those of the whole softmax,
    it returns the text's part of the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, chain_keys: Tensor, chain_values: Tensor
    ) -> Tensor:
        out, logsum, state = _causal(queries, keys, values)
        grouped = _grouped(queries, chain_keys)  # [B, kv_heads, L, group, d]
        scores = (grouped @ chain_keys.mT).float() / math.sqrt(queries.shape[-1])  # [B, kv_heads, L, group, passes]
        text = _grouped(logsum[..., None], chain_keys)  # [B, kv_heads, L, group, 1]
        total = torch.cat([text, scores], -1).logsumexp(-1, keepdim=True)
        mixed = _grouped(out, chain_keys) * (text - total).exp() + (scores - total).exp() @ chain_values.float()
        out, logsum = _flat(mixed).to(queries.dtype), _flat(total).squeeze(-1)
        ctx.save_for_backward(queries, keys, values, chain_keys, chain_values, out, logsum, *state)
        return out

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, ...]:
        queries, keys, values, chain_keys, chain_values, out, logsum, *state = ctx.saved_tensors
        by_query, by_key, by_value = _causal_backward(given, queries, keys, values, out, logsum, state)
        scale = 1 / math.sqrt(queries.shape[-1])
        grouped, slope, total = (_grouped(x, chain_keys) for x in (queries, given, logsum[..., None]))
        level = (slope.float() * _grouped(out, chain_keys).float()).sum(-1, keepdim=True)
        weights = ((grouped @ chain_keys.mT).float() * scale - total).exp()  # [B, kv_heads, L, group, passes]
        inner = (weights * ((slope @ chain_values.mT).float() - level) * scale).to(queries.dtype)
        by_chain = inner.mT @ grouped, weights.to(queries.dtype).mT @ slope
        return by_query + _flat(inner @ chain_keys), by_key, by_value, *by_chain


def _grouped(x: Tensor, chain: Tensor) -> Tensor:
    """[B, heads, L, d] → [B, kv_heads, L, group, d], by the heads of `chain`."""
    return x.reshape(len(x), chain.shape[1], -1, *x.shape[2:]).transpose(2, 3)


def _flat(x: Tensor) -> Tensor:
    return x.transpose(2, 3).flatten(1, 2)


def _causal(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output, the log-sum-exp of each row [B, heads, L], and what else the backward kernel needs."""
    rows = queries, keys, values
    if not queries.is_cuda:
        out, logsum = aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, True)
        return out, logsum, []
    if _has_flash_kernel(queries):
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
    elif _has_flash_kernel(queries):
        backward = aten._scaled_dot_product_flash_attention_backward
        found = backward(*rows, out, logsum.contiguous(), None, None, length, length, 0.0, True, *state)
    else:
        logsum = F.pad(logsum, (0, -length % 32), value=torch.inf).contiguous()  # as the forward kernel pads it
        backward = aten._scaled_dot_product_efficient_attention_backward
        found = backward(*rows, None, out, logsum, *state, 0.0, [True, True, True, False], True)
    return found[0], found[1], found[2]


def _has_fused_kernel(queries: Tensor) -> bool:
    if not queries.is_cuda:
        return queries.device.type == "cpu" and queries.dtype != torch.float64
    return _has_flash_kernel(queries) or (queries.dtype == torch.float32 and queries.shape[-1] % 4 == 0)


def _has_flash_kernel(queries: Tensor) -> bool:
    half, size = queries.dtype in (torch.bfloat16, torch.float16), queries.shape[-1]
    return half and size % 8 == 0 and size <= 256 and torch.cuda.get_device_capability(queries.device) >= (8, 0)


def _masked(
    queries: Tensor, text: tuple[Tensor, Tensor], chains: list[tuple[Tensor, Tensor]], window: int | None
) -> Tensor:
    """The same with an explicit mask, for windows and for inputs without a fused kernel."""
    heads = queries.shape[1]
    rows = [text, *((x.repeat_interleave(heads // x.shape[1], 1) for x in pair) for pair in chains)]
    keys, values = (torch.cat(parts, 2) for parts in zip(*rows, strict=True))
    return masked_attention(queries, keys, values, chain_mask(queries, len(chains), window)[None])


def chain_mask(queries: Tensor, later: int, window: int | None) -> Tensor:
    """The mask of the newest of `later` passes after the text, [L, (1 + later) * L] bool.

    A row attends to the text up to its column and to its own chain, to positions less than `window` before its own.
    """
    count, device = queries.shape[2], queries.device
    places = torch.arange(count, device=device)
    past = places <= places[:, None]
    own = torch.eye(count, dtype=torch.bool, device=device)
    mask = torch.cat([past, *[own] * later], -1)
    columns = torch.cat([places + step for step in range(later + 1)])  # positions
    return within(mask, places[:, None] + later - columns, window)
