"""Finds out what the layers of a transformers model keep, and what they ask of their attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from windfall.engine.gpu.attention_function import Asked
from windfall.engine.gpu.forward import Unsupported
from windfall.engine.gpu.kv_layout import LayerShape, OpenLayer, layer_shape

HARMLESS = {  # arguments of attention functions that change nothing here: masks, positions and outputs are windfall's
    "cache_position",
    "is_causal",
    "logits_to_keep",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "sliding_window",
    "use_cache",
}


class Recorder:
    """Notes what each layer keeps and asks for, and answers with zeros."""

    def __init__(self, layers: int, masks: list[Tensor]):
        self.cache = Cache(layers=[RecordedLayer() for _ in range(layers)])
        self.layers: list[LayerShape | None] = []
        self.groups: set[int] = set()  # query heads for each key head
        self.special = False  # whether attention has soft caps or sinks
        self._masks, self._attended = masks, set[int]()

    def attend(self, asked: Asked) -> Tensor:
        """Raises Unsupported for what windfall's attention cannot do."""
        places = [place for place, layer in enumerate(self.cache.layers) if layer.kept(asked.key, asked.value)]
        if not places:
            raise Unsupported("its attention changes the keys or values of its KV cache")
        if not any(asked.mask is mask for mask in self._masks):
            raise Unsupported("its attention changes its mask")
        for name, value in asked.others.items():
            if name not in HARMLESS and (isinstance(value, Tensor) or value):
                raise Unsupported(f"its attention has {name}")
        (_, heads, count, _), shared = asked.query.shape, asked.key.shape[1]
        if asked.query.dtype != asked.key.dtype or asked.query.shape[3] != asked.key.shape[3] or heads % shared:
            raise Unsupported("its queries do not fit its keys")
        if asked.scale is not None and not (isinstance(asked.scale, float | int) and asked.scale > 0):
            raise Unsupported("its attention scores have no positive scale")
        if asked.sinks is not None and asked.sinks.shape != (heads,):
            raise Unsupported("its attention sinks are not one number for each head")
        self._attended.add(places[0])
        self.groups.add(heads // shared)
        self.special |= asked.cap is not None or asked.sinks is not None
        return asked.query.new_zeros(count, heads, asked.value.shape[3])

    def finish(self) -> None:
        """Raises Unsupported unless all layers attended through the interface."""
        kept = [place for place, layer in enumerate(self.cache.layers) if layer.is_initialized]
        if not kept or {*kept} != self._attended:
            raise Unsupported("its attention is not called through transformers' interface")
        for layer in self.cache.layers:
            self.layers.append(layer_shape(layer.keys, layer.values) if layer.is_initialized else None)


class RecordedLayer(OpenLayer):
    """Keeps the keys and values of one pass."""

    is_initialized: bool

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            raise Unsupported("a layer keeps keys and values twice in a pass")
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states

    def kept(self, keys: Tensor, values: Tensor) -> bool:
        """Whether these are the ones it keeps."""
        return self.is_initialized and self.keys is keys and self.values is values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0
