"""The KV cache of all live sequences: preallocated; a tree's rows are staged, and accepted ones are committed."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from windfall.core.tree import Integers
from windfall.core.types import FULL_PRECISION

GROWTH_ROWS = 256  # the capacity is a multiple of this


class Rows(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, [B, heads, capacity, head_dim]; allocated when the layer first runs."""

    is_sliding = False

    def __init__(self, owner: KVCache):
        super().__init__()
        self._owner = weakref.ref(owner)  # so that a cache that is dropped is freed at once, not by garbage collection

    @property
    def owner(self) -> KVCache:
        owner = self._owner()
        assert owner is not None
        return owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (self._empty(like) for like in (key_states, value_states))
        self.is_initialized = True

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(like.shape[0], like.shape[1], self.owner.capacity, like.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.owner.end
        end = start + key_states.shape[2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def allocated(self, keys: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values, allocated for heads of this width if need be; new keys [B, n, heads * width] are given."""
        if not self.is_initialized:
            like = keys.view(*keys.shape[:2], -1, width).transpose(1, 2)
            self.lazy_initialization(like, like)
        return self.keys, self.values

    def resize(self) -> None:
        old = self.keys, self.values
        self.keys, self.values = (self._empty(x) for x in old)
        for new, kept in zip((self.keys, self.values), old, strict=True):
            new[:, :, : kept.shape[2]] = kept

    def move(self, moves: Integers) -> None:
        """Copy rows, moves [3, n]: the sequence of each, the row and its goal. All are read before any is written."""
        quick = self.device.type == "cpu" and self.dtype in FULL_PRECISION  # numpy is quicker for a few rows
        batch, source, goal = moves if quick else torch.from_numpy(moves).to(self.device)
        for rows in (self.keys, self.values):
            given: Any = rows.numpy() if quick else rows
            given[batch, :, goal] = given[batch, :, source]

    def append(self, count: int) -> None:
        """Add this many empty sequences."""
        self.keys, self.values = (torch.cat([x, x.new_zeros(count, *x.shape[1:])]) for x in (self.keys, self.values))

    def take(self, other: Rows, places: Tensor) -> None:
        """Copy these sequences of another layer, as far as the capacity goes."""
        self.dtype, self.device, end = other.dtype, other.device, self.owner.capacity
        self.keys, self.values = other.keys[places, :, :end], other.values[places, :, :end]
        self.is_initialized = True

    def put(self, other: Rows, places: Tensor, rows: int) -> None:
        """Copy the first rows of all sequences of another layer to these sequences."""
        if not self.is_initialized:
            self.dtype, self.device, batch = other.dtype, other.device, len(self.owner.lengths)
            self.keys, self.values = (
                x.new_zeros(batch, x.shape[1], self.owner.capacity, x.shape[3]) for x in (other.keys, other.values)
            )
            self.is_initialized = True
        self.keys[places, :, :rows], self.values[places, :, :rows] = other.keys[:, :, :rows], other.values[:, :, :rows]

    def get_seq_length(self) -> int:
        return self.owner.end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.end + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class KVCache(Cache):  # type: ignore[misc]
    """Committed rows [0, lengths[b]) of each sequence; from `top` on, the staged rows of the current tree."""

    def __init__(self, layers: int, batch: int):
        super().__init__(layers=[Rows(self) for _ in range(layers)])
        self.capacity = GROWTH_ROWS
        self.lengths = [0] * batch
        self.staged = 0

    @property
    def top(self) -> int:
        """Where staged rows begin: after the longest sequence."""
        return max(self.lengths, default=0)

    @property
    def end(self) -> int:
        return self.top + self.staged

    @property
    def live(self) -> list[Rows]:
        return [rows for rows in self.layers if rows.is_initialized]

    def reserve(self, rows: int) -> None:
        """Make room for this many more staged rows."""
        if self.end + rows > self.capacity:
            self.capacity = _rounded(max(self.end + rows, self.capacity + self.capacity // 2))
            for layer in self.live:
                layer.resize()

    def commit(self, keep: list[list[int]]) -> None:
        """Commit these staged rows of each sequence, in order, and drop the other staged rows."""
        top = self.top
        moves = [
            (b, top + row, self.lengths[b] + place)
            for b, rows in enumerate(keep)
            for place, row in enumerate(rows)
            if top + row != self.lengths[b] + place
        ]
        if moves:
            where = np.array(moves).T
            for layer in self.live:
                layer.move(where)
        self.lengths = [length + len(rows) for length, rows in zip(self.lengths, keep, strict=True)]
        self.staged = 0

    def truncate(self, lengths: list[int]) -> None:
        """Drop committed rows after these lengths."""
        assert self.staged == 0 and all(new <= old for new, old in zip(lengths, self.lengths, strict=True))
        self.lengths = list(lengths)

    def retain(self, keep: list[int]) -> None:
        """Keep these sequences only; rows that none of them needs are given back."""
        assert self.staged == 0
        self.lengths = [self.lengths[b] for b in keep]
        if self.capacity > 2 * (needed := _rounded(self.top)):
            self.capacity = needed
        for layer in self.live:
            layer.take(layer, torch.tensor(keep, dtype=torch.long, device=layer.device))

    def append(self, count: int) -> None:
        """Add this many empty sequences."""
        assert self.staged == 0
        self.lengths = [*self.lengths, *[0] * count]
        for layer in self.live:
            layer.append(count)

    def part(self, places: list[int]) -> KVCache:
        """A cache with a copy of these sequences."""
        assert self.staged == 0
        made = KVCache(len(self.layers), 0)
        made.lengths = [self.lengths[b] for b in places]
        made.capacity = min(self.capacity, _rounded(made.top))
        for own, new in zip(self.layers, made.layers, strict=True):
            if own.is_initialized:
                new.take(own, torch.tensor(places, dtype=torch.long, device=own.device))
        return made

    def put(self, places: list[int], part: KVCache) -> None:
        """Replace these sequences by those of another cache."""
        assert self.staged == part.staged == 0
        self.reserve(part.top - self.top)
        for b, length in zip(places, part.lengths, strict=True):
            self.lengths[b] = length
        for own, new in zip(self.layers, part.layers, strict=True):
            if new.is_initialized:
                own.put(new, torch.tensor(places, dtype=torch.long, device=new.device), part.top)

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers; 0 before the first pass."""
        pairs = [(x.shape[1] * x.shape[3], x.element_size()) for rows in self.live for x in (rows.keys, rows.values)]
        return sum(numbers * size for numbers, size in pairs)

    def check(self) -> None:
        """Assert every invariant of the buffers."""
        assert self.staged >= 0 and self.end <= self.capacity
        for layer in self.live:
            assert layer.keys.shape[0] == layer.values.shape[0] == len(self.lengths)
            assert layer.keys.shape[2] == layer.values.shape[2] == self.capacity

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.end

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.end + query_length, 0


def _rounded(rows: int) -> int:
    """The capacity for this many rows."""
    return -(-max(rows, 1) // GROWTH_ROWS) * GROWTH_ROWS
