"""Key-value rows of many slots at fixed addresses, and attention in which every slot has its own length."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

NAME = "windfall_slots"  # of the attention, among those of transformers
UNKNOWN = ("softcap", "sliding_window", "s_aux", "position_bias")  # what `attend` cannot do


class Bounds(NamedTuple):
    """Where sequences begin and end in the flattened rows of a pass, as the flash kernel wants it."""

    queries: Tensor  # [sequences + 1] int32
    keys: Tensor  # [sequences + 1] int32
    longest: tuple[int, int]  # queries and keys of a sequence at the most
    used: Tensor | None = None  # [sequences] int32: keys that count; None: all
    causal: bool = False


class SlotRows(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, [B, capacity, heads, head_dim]; made when the layer first runs."""

    is_sliding = False

    def __init__(self, owner: Slots):
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
        for rows, fresh in ((self.keys, key_states), (self.values, value_states)):
            rows.flatten(0, 1).index_copy_(0, self.owner.goal, fresh.transpose(1, 2).flatten(0, 1))
        if self.owner.filling:
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


class Slots(Cache):  # type: ignore[misc]
    """`batch` sequences of up to `capacity` rows. New rows go where `goal` says; a pass that is `filling` sees its own
    rows alone, any other the first `width` rows of every slot."""

    running: ClassVar[Slots | None] = None  # the one whose `bounds` hold for `attend`

    def __init__(self, layers: int, batch: int, capacity: int):
        super().__init__(layers=[SlotRows(self) for _ in range(layers)])
        self.batch, self.capacity, self.width = batch, capacity, capacity
        self.goal: Tensor  # [rows] long: slot * capacity + position
        self.filling = False
        self.bounds: Bounds | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


def attend(
    module: Any,
    query: Tensor,  # [b, heads, n, head_dim]
    key: Tensor,  # [b, fewer heads, m, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention within the bounds of the running Slots, each sequence as long as it is, in one flash kernel."""
    if odd := [name for name in UNKNOWN if more.get(name) is not None]:
        raise NotImplementedError(f"attention with {odd[0]}")
    assert Slots.running is not None and Slots.running.bounds is not None and dropout == 0
    queries, keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))  # [rows, heads, d]
    mixed = flash(queries, keys, values, Slots.running.bounds, scaling)
    return mixed.view(query.shape[0], query.shape[2], *mixed.shape[1:]), None


def flash(query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scale: float | None) -> Tensor:
    """The kernel: [rows, heads, head_dim] → the same shape as `query`; heads of `key` may serve several queries'."""
    found = torch.ops.aten._flash_attention_forward(
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
    )
    mixed: Tensor = found[0]
    return mixed


AttentionInterface.register(NAME, attend)
