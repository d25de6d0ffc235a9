"""A model's forward over fixed buffers: rows of a tree in, logits and tapped states out. Any transformers model runs
as `TransformersForward`; those with Llama's skeleton run as `FusedLlama` (stack.py), which launches far fewer kernels."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from windfall.heads.layers import follows_length
from windfall.kernels.attention import visible
from windfall.model.decoder import Decoder, as_given, attention_windows, tree_attention
from windfall.model.hidden_states import with_states


class Unsupported(Exception):
    """This model, drafter or sampling cannot run on fixed buffers; the message says why."""


class Paths(NamedTuple):
    """What each row sees, in the order of the text: for sums that depend on nothing else (`path_attention`)."""

    reach: Tensor  # [n] long: how many keys, itself included; 0 for padding
    lineage: Tensor  # [n, S] int32: slot, from `length` on, of its ancestor at each depth


class Pass(NamedTuple):
    """The rows of one forward. Committed rows [0, length) are seen by all; `mask` says which staged ones are."""

    tokens: Tensor  # [n] long
    positions: Tensor  # [n] long
    slots: Tensor  # [n] long, where keys and values go
    mask: Tensor  # [n, S] bool, over the slots from `length` on
    length: Tensor  # [1] long
    paths: Paths | None = None  # the same as `mask`, where rounding must not depend on the rows beside a row


class Forward(Protocol):
    """Runs rows through a model whose keys and values lie in `kv`, [2, layers, kv_heads, capacity, d]."""

    shape: tuple[int, int, int]  # layers, kv_heads, d
    bucketed: bool  # whether a pass reads columns up to a bound that the host must give

    def __call__(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor | None]:
        """Logits [n, V] and the states at `taps` (see windfall.model.hidden_states), side by side [n, taps * H]."""
        ...


class TransformersForward:
    """A transformers model as it is, over a bounded number of columns under an explicit mask."""

    bucketed = True

    def __init__(self, model: Any, compiled: bool = False):
        config = model.config.get_text_config()
        check_supported(model)
        self.model = model
        self._last = (getattr(config, "max_position_embeddings", None) or 2**31) - 1
        self._call = torch.compile(model, dynamic=False) if compiled else model
        self.shape = cache_shape(model)

    def __call__(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor | None]:
        seen = visible(rows.length, rows.mask, columns)
        with tree_attention(self.model):
            outputs, states = with_states(
                self._call,
                self.model,
                taps,
                input_ids=rows.tokens[None],
                position_ids=rows.positions.clamp(max=self._last)[None],  # past it targets keep nothing, drafts suffer
                attention_mask=as_given(seen[None, None], self.model),
                past_key_values=PassCache(kv, rows.slots, columns),
                use_cache=True,
            )
        return outputs.logits[0], None if states is None else states[0]


def check_supported(model: Any) -> None:
    """Say why no forward over fixed buffers would give what this model gives."""
    config = model.config.get_text_config()
    if attention_windows(config):
        raise Unsupported("its attention has sliding windows")
    if follows_length(config):  # a tree may reach past the end, where they change for all rows
        raise Unsupported("its rotary angles depend on the length of the text")
    if len({weight.device for weight in model.parameters()}) > 1:
        raise Unsupported("its weights lie on several devices")


def cache_shape(model: Any) -> tuple[int, int, int]:
    """Layers, heads and width of the keys and values, as the model makes them: configurations do not always say."""
    decoder = Decoder(model)
    decoder.reset(1)
    decoder.extend([[0]])
    made = {(rows.shape[1], rows.shape[3]) for layer in decoder.cache.live for rows in (layer.keys, layer.values)}
    if len(made) != 1:
        raise Unsupported("its keys and values differ in shape")
    return (len(decoder.cache.layers), *made.pop())


class PassCache(Cache):  # type: ignore[misc]
    """What a transformers model takes for a cache: one pass's view of the buffer."""

    def __init__(self, kv: Tensor, slots: Tensor, columns: int):
        super().__init__(layers=[PassCacheLayer(kv[:, layer], slots, columns) for layer in range(kv.shape[1])])
        self.columns = columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns, 0


class PassCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of it."""

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
