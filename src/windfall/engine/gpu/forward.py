"""A model's forward over fixed buffers, from the rows of a tree to logits and tapped states.

Most transformers models run as `TransformersForward`. Models of the families in families.py run as `FusedForward`
(fused.py), which launches far fewer kernels and knows sliding windows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from windfall.heads.layers import follows_length
from windfall.kernels.attention import path_attention, tree_attention, visible
from windfall.kernels.pages import Pages
from windfall.kernels.rows import ancestors
from windfall.model.decoder import Decoder, as_given, attention_windows
from windfall.model.decoder import tree_attention as with_tree_attention
from windfall.model.hidden_states import with_states


class Unsupported(Exception):
    """This model cannot run in fixed buffers; the message says why."""


class Paths(NamedTuple):
    """Where the keys that each row sees lie: those of positions 0 to `reach` - 1 of its own text."""

    reach: Tensor  # [n] long: the number of keys, its own included; 0 for padding
    lineage: Tensor | None  # [n, S] int32: the slot of its ancestor at each depth; None: the rows are a chain
    pages: Pages | None = None  # the requests of the rows, in a batch
    first: int = 0  # keys of earlier positions are not seen


class Pass(NamedTuple):
    """The rows of one forward. Committed rows [0, length) are seen by all; `mask` says which staged ones are."""

    tokens: Tensor  # [n] long
    positions: Tensor  # [n] long
    slots: Tensor  # [n] long, where keys and values go
    mask: Tensor  # [n, S] bool, over the slots from `length` on
    length: Tensor  # [1] long
    paths: Paths | None = None  # the same as `mask`, for attention in the order of positions

    @classmethod
    def in_pages(cls, tokens: Tensor, positions: Tensor, slots: Tensor, paths: Paths) -> Pass:
        """The rows of several requests, which have paths and no mask."""
        assert paths.pages is not None
        return cls(tokens, positions, slots, torch.empty(0, 0, dtype=torch.bool), paths.pages.lengths, paths)

    def up_to(self, last_token: int | None) -> Pass:
        """With this token in place of larger ones; None: as it is."""
        return self if last_token is None else self._replace(tokens=self.tokens.clamp(max=last_token))

    def attend(self, queries: Tensor, kv: Tensor, window: int | None = None) -> Tensor:
        """Attention of a drafter's rows, queries [n, heads, d], over its layer of the KV cache [2, kv_heads, …]."""
        given = queries, kv[0], kv[1], self.length
        if self.paths is None or self.paths.pages is None:
            return tree_attention(*given, self.mask, positions=self.positions, window=window)
        reach, lineage, pages, first = self.paths
        return path_attention(*given, reach, lineage, window=window, pages=pages, first=first)


class Forward(Protocol):
    """Runs rows through a model whose keys and values lie in `kv`, [2, layers, kv_heads, capacity, d]."""

    shape: tuple[int, int, int]  # layers, kv_heads, d
    bucketed: bool  # whether a pass reads the KV cache up to a bound that the host must give

    def __call__(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor | None]:
        """Logits [n, V] and the states at `taps` (see windfall.model.hidden_states), side by side [n, taps * H]."""
        ...

    def prefill(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> Tensor | None:
        """The same without logits."""
        ...


class TransformersForward:
    """An unchanged transformers model that reads a bounded number of KV columns under an explicit mask."""

    bucketed = True

    def __init__(self, model: Any, compiled: bool = False):
        config = model.config.get_text_config()
        if attention_windows(config):
            raise Unsupported("its attention has sliding windows")
        if follows_length(config):  # rows past the end of the text would change the angles of all rows
            raise Unsupported("its rotary angles depend on the length of the text")
        check_devices(model)
        self.model = model
        self._last = (getattr(config, "max_position_embeddings", None) or 2**31) - 1
        self._call = torch.compile(model, dynamic=False) if compiled else model
        self.shape = cache_shape(model)

    def prefill(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> Tensor | None:
        return self(rows, kv, taps, columns)[1]

    def __call__(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor | None]:
        seen = visible(rows.length, rows.mask, columns)
        with with_tree_attention(self.model):
            outputs, states = with_states(
                self._call,
                self.model,
                taps,
                input_ids=rows.tokens[None],
                position_ids=rows.positions.clamp(max=self._last)[None],  # later rows are never committed
                attention_mask=as_given(seen[None, None], self.model),
                past_key_values=PassCache(kv, rows.slots, columns),
                use_cache=True,
            )
        return outputs.logits[0], None if states is None else states[0]


def check_devices(model: Any) -> None:
    """Raise Unsupported if a model's weights lie on several devices."""
    if len({weight.device for weight in model.parameters()}) > 1:
        raise Unsupported("its weights lie on several devices")


def paths_of(mask: Tensor, length: Tensor) -> Paths:
    """The paths that a mask [n, S] describes, if each row sees its ancestors in the order of their slots."""
    seen = mask.cumsum(1)  # how many rows a row sees, up to each slot
    return Paths(length + seen[:, -1], length.int() + ancestors(mask, seen - 1))


def cache_shape(model: Any) -> tuple[int, int, int]:
    """Layers, heads and dimensions of keys and values, from a forward: configurations do not always have them."""
    decoder = Decoder(model)
    decoder.reset(1)
    decoder.extend([[0]])
    made = {(rows.shape[1], rows.shape[3]) for layer in decoder.cache.live for rows in (layer.keys, layer.values)}
    if len(made) != 1:
        raise Unsupported("its keys and values differ in shape")
    return (len(decoder.cache.layers), *made.pop())


class PassCache(Cache):  # type: ignore[misc]
    """A transformers Cache over the fixed buffer, for one pass."""

    def __init__(self, kv: Tensor, slots: Tensor, columns: int):
        super().__init__(layers=[PassCacheLayer(kv[:, layer], slots, columns) for layer in range(kv.shape[1])])
        self.columns = columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns, 0


class PassCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a PassCache."""

    is_sliding = False

    def __init__(self, kv: Tensor, slots: Tensor, columns: int):
        super().__init__()
        self.kv, self.slots, self.columns = kv, slots, columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.kv[0].index_copy_(1, self.slots, key_states[0])
        self.kv[1].index_copy_(1, self.slots, value_states[0])
        return self.kv[0][None, :, : self.columns], self.kv[1][None, :, : self.columns]

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.columns, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length
