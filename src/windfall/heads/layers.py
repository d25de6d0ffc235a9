"""The layers of draft heads.

The caller passes a `Memory`, which stores keys and values and knows which rows see which. So one forward serves
drafting with a KV cache and all training methods.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class Memory(Protocol):
    """Stores the keys and values of earlier rows; knows which of them the current rows see."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Queries [B, heads, n, d], keys and values [B, kv_heads, n, d] of the current rows → [B, heads, n, d]."""
        ...


class ContextMemory(Memory, Protocol):
    """A memory that also takes keys and values of rows without queries."""

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [B, kv_heads, n, d]; rows that attend later may see them."""
        ...


def masked_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention; mask [B, n, columns] bool, None: every row sees every column."""
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=None if mask is None else mask[:, None])


def within(mask: Tensor, age: Tensor, window: int | None) -> Tensor:
    """The mask [B, n, columns], limited to columns less than `window` positions before the row; `age` has the same
    shape and holds the differences."""
    return mask if window is None else mask & (age < window)


class Unrolled:
    """The memory for training: differentiable rows of earlier passes, with explicit masks."""

    def __init__(self, windows: tuple[int | None, ...] = ()) -> None:
        self._rows: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._windows = windows  # of each layer
        self.mask: Tensor | None = None  # [B or 1, n, all rows so far] bool, set before each pass
        self.age: Tensor | None = None  # the same shape: positions between row and column, where there are windows

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._rows.setdefault(layer, []).append((keys, values))

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.append(layer, keys, values)
        keys, values = (torch.cat(parts, 2) for parts in zip(*self._rows[layer], strict=True))
        mask = self.mask
        if self._windows and mask is not None and self.age is not None:
            mask = within(mask, self.age, self._windows[layer])
        return masked_attention(queries, keys, values, mask)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and torch.is_autocast_enabled("cuda"):  # training: one kernel instead of six
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Rotary grouped-query attention whose input may be wider than its output."""

    def __init__(self, config: Any, place: int, width: int):
        super().__init__()
        self.place, self.dim = place, head_dim(config)
        heads, shared, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.dim, bias)
        self.k_proj = nn.Linear(width, shared * self.dim, bias)
        self.v_proj = nn.Linear(width, shared * self.dim, bias)
        self.o_proj = nn.Linear(heads * self.dim, config.hidden_size, getattr(config, "o_bias", bias))
        normed = getattr(config, "qk_norm", False)
        self.q_norm = RMSNorm(self.dim, config.rms_norm_eps) if normed else None
        self.k_norm = RMSNorm(self.dim, config.rms_norm_eps) if normed else None

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        queries = self.q_proj(x).unflatten(-1, (-1, self.dim))  # [B, n, heads, d]
        queries = queries if self.q_norm is None else self.q_norm(queries)
        queries = rotate(queries.transpose(1, 2), *turn)
        out = memory.attend(self.place, queries, *self.keys_values(x, turn))
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected

    def keys_values(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values of rows [B, n, width]: each [B, kv_heads, n, d]."""
        keys, values = (project(x).unflatten(-1, (-1, self.dim)) for project in (self.k_proj, self.v_proj))
        keys = keys if self.k_norm is None else self.k_norm(keys)
        return rotate(keys.transpose(1, 2), *turn), values.transpose(1, 2)


class MLP(nn.Module):
    """A gated feed-forward block; `out` is the width of its output."""

    def __init__(self, config: Any, out: int | None = None):
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias)
        self.down_proj = nn.Linear(config.intermediate_size, out or config.hidden_size, bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """An ordinary decoder layer; EAGLE's first one has no norm before its attention."""

    def __init__(self, config: Any, place: int, input_norm: bool = True):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps) if input_norm else nn.Identity()
        self.self_attn = Attention(config, place, size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, turn: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), turn, memory)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Rotary(nn.Module):
    """Rotary angles of any rope type that transformers knows.

    They do not change while decoding, so positions must stay below the config's limit. With `partial_rotary_factor`
    only that share of a head's channels is rotated, and only those have angles.
    """

    def __init__(self, config: Any):
        super().__init__()
        self._config, self.rotated = config, head_dim(config)
        rope = dict(getattr(config, "rope_parameters", None) or {})
        if rope.get("rope_type") != "proportional" and (share := rope.pop("partial_rotary_factor", None)) is not None:
            self.rotated = int(self.rotated * share)
            self._config = copy.copy(config)
            self._config.head_dim, self._config.rope_parameters = self.rotated, rope
        self._made: dict[torch.device, Any] = {}

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, [B, 1, n, d]."""
        cos, sin = self.angles(torch.empty(0, dtype=dtype, device=positions.device), positions)
        return cos[:, None], sin[:, None]

    def angles(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [B, n, d], in the dtype of `like`."""
        device = positions.device
        if device not in self._made:
            self._made[device] = LlamaRotaryEmbedding(self._config).to(device)
        cos, sin = self._made[device](like, positions)
        return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to [B, heads, n, d], paired in halves as in transformers; channels without angles stay."""
    if (rotated := cos.shape[-1]) < x.shape[-1]:
        return torch.cat([rotate(x[..., :rotated], cos, sin), x[..., rotated:]], -1)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def rope_kinds(config: Any) -> set[str]:
    """The rope types of all layers, by transformers' names: in some models layers have different rotary angles."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    return {str(part.get("rope_type", "default")) for part in parts}


def follows_length(config: Any) -> bool:
    """Whether the angles of a position change with the length of the text."""
    return not rope_kinds(config).isdisjoint({"dynamic", "longrope"})


def head_dim(config: Any) -> int:
    found: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return found
