"""The KV cache of bulk generation: fixed slots of fixed capacity, and attention with a length per slot."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

ATTENTION_NAME = "windfall_slots"  # registered with transformers
UNSUPPORTED_ARGUMENTS = ("softcap", "sliding_window", "s_aux", "position_bias")


class Bounds(NamedTuple):
    """Where sequences begin and end in the flattened rows of a pass, in the form of the flash attention kernel."""

    queries: Tensor  # [sequences + 1] int32
    keys: Tensor  # [sequences + 1] int32
    longest: tuple[int, int]  # largest number of queries and of keys per sequence
    used: Tensor | None = None  # [sequences] int32: valid keys per sequence; None: all
    causal: bool = False


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [slots, capacity, heads, head_dim], allocated when the layer first runs."""

    is_sliding = False

    def __init__(self, owner: SlotCache):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        size = self.owner.batch, self.owner.capacity
        self.keys, self.values = (x.new_zeros(*size, x.shape[1], x.shape[3]) for x in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        for rows, new in ((self.keys, key_states), (self.values, value_states)):
            rows.flatten(0, 1).index_copy_(0, self.owner.write_rows, new.transpose(1, 2).flatten(0, 1))
        if self.owner.prefilling:
            return key_states, value_states
        width = self.owner.width
        return self.keys[:, :width].transpose(1, 2), self.values[:, :width].transpose(1, 2)

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class SlotCache(Cache):  # type: ignore[misc]
    """`batch` slots of `capacity` rows each.

    New rows are written to `write_rows`. While `prefilling`, a pass attends to its own rows only; otherwise it attends
    to the first `width` rows of every slot.
    """

    running: ClassVar[SlotCache | None] = None  # the cache whose `bounds` `attend` uses

    def __init__(self, layers: int, batch: int, capacity: int):
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])
        self.batch, self.capacity, self.width = batch, capacity, capacity
        self.write_rows: Tensor  # [rows] long: slot * capacity + position
        self.prefilling = False
        self.bounds: Bounds | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


def attend(
    module: Any,
    query: Tensor,  # [b, heads, n, head_dim]
    key: Tensor,  # [b, kv_heads, m, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention within the bounds of the running SlotCache: one flash kernel, with each sequence's own length."""
    if unsupported := [name for name in UNSUPPORTED_ARGUMENTS if more.get(name) is not None]:
        raise NotImplementedError(f"attention with {unsupported[0]}")
    assert SlotCache.running is not None and SlotCache.running.bounds is not None and dropout == 0
    queries, keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))  # [rows, heads, d]
    output = flash(queries, keys, values, SlotCache.running.bounds, scaling)
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]), None


def flash(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float | None) -> Tensor:
    """Variable-length flash attention over [rows, heads, head_dim]; `key` and `value` may have fewer heads."""
    output: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        bounds.queries,
        bounds.keys,
        *bounds.longest,
        0.0,  # dropout
        bounds.causal,
        False,  # no debug mask
        scale=scale,
        seqused_k=bounds.used,
    )[0]
    return output


AttentionInterface.register(ATTENTION_NAME, attend)
