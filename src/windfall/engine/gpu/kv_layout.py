"""The keys and values of a transformers model in one fixed buffer, whose layers may differ in shape."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from windfall.engine.gpu.forward import Unsupported


class LayerShape(NamedTuple):
    """What a layer keeps of each token."""

    heads: int
    key_width: int
    value_width: int


def layer_shape(keys: Tensor, values: Tensor) -> LayerShape:
    """The shape of a layer with these keys and values [B, heads, n, width]."""
    if keys.shape[1] != values.shape[1]:
        raise Unsupported("its keys and values differ in their number of heads")
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3])


class KvLayout(NamedTuple):
    """Where the layers of a model keep their keys and values in a buffer [2, layers, heads, capacity, d]."""

    layers: tuple[LayerShape | None, ...]  # None: it keeps none, for example because it reads those of another layer

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, heads and dimensions of the buffer: the largest ones of all layers."""
        kept = [layer for layer in self.layers if layer is not None]
        width = max(max(layer.key_width, layer.value_width) for layer in kept)
        return len(kept), max(layer.heads for layer in kept), width

    def parts(self, kv: Tensor) -> list[Tensor | None]:
        """Each layer's part of the buffer, [2, heads, capacity, d]. Keys or values may be narrower than d."""
        parts: list[Tensor | None] = []
        place = 0
        for layer in self.layers:
            if layer is None:
                parts.append(None)
                continue
            parts.append(kv[:, place, : layer.heads, :, : max(layer.key_width, layer.value_width)])
            place += 1
        return parts


class PassCache(Cache):  # type: ignore[misc]
    """A transformers Cache over the fixed buffer, for one pass."""

    def __init__(self, layout: KvLayout, kv: Tensor, slots: Tensor, columns: int):
        """The pass reads the first `columns` slots."""
        parts = zip(layout.layers, layout.parts(kv), strict=True)
        super().__init__(layers=[PassCacheLayer(shape, part, slots, columns) for shape, part in parts])
        self.columns = columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.columns, 0


class OpenLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer whose length transformers need not know: positions and masks are given."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class PassCacheLayer(OpenLayer):
    """One layer of a PassCache."""

    def __init__(self, shape: LayerShape | None, part: Tensor | None, slots: Tensor, columns: int):
        super().__init__()
        self.part, self.slots, self.columns = part, slots, columns
        self.is_initialized = shape is not None
        if shape is not None and part is not None:
            self.all_keys, self.all_values = part[0, :, :, : shape.key_width], part[1, :, :, : shape.value_width]
            self.keys, self.values = (x[None, :, :columns] for x in (self.all_keys, self.all_values))

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.all_keys.index_copy_(1, self.slots, key_states[0])
        self.all_values.index_copy_(1, self.slots, value_states[0])
        return self.keys, self.values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.columns, 0
