"""Forwards that run the unchanged modules of a transformers model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windfall.engine.gpu.forward import Pass, Unsupported, check_devices
from windfall.engine.gpu.kv_layout import KvLayout, PassCache, layer_shape
from windfall.heads.layers import follows_length
from windfall.kernels.attention import visible
from windfall.model.decoder import Decoder, as_given, attention_windows, tree_attention
from windfall.model.hidden_states import with_states
from windfall.model.pass_lock import pass_lock


class ModulesForward:
    """What the forwards here share."""

    layout: KvLayout  # of keys and values

    def __init__(self, model: Any):
        config = model.config.get_text_config()
        if follows_length(config):  # rows past the end of the text would change the angles of all rows
            raise Unsupported("its rotary angles depend on the length of the text")
        check_devices(model)
        self.model = model
        self._last = (getattr(config, "max_position_embeddings", None) or 2**31) - 1

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.layout.shape

    def _run(self, call: Any, rows: Pass, taps: tuple[int, ...], mask: Any, cache: PassCache) -> tuple[Any, Any]:
        """Outputs of the model or its base model for these rows, and their states at `taps`."""
        outputs, states = with_states(
            call,
            self.model,
            taps,
            input_ids=rows.tokens[None],
            position_ids=rows.positions.clamp(max=self._last)[None],  # later rows are never committed
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )
        return outputs, None if states is None else states[0]


class MaskedForward(ModulesForward):
    """Reads a bounded number of KV columns under an explicit mask."""

    bucketed = True

    def __init__(self, model: Any, compiled: bool = False):
        super().__init__(model)
        if attention_windows(model.config.get_text_config()):
            raise Unsupported("its attention has sliding windows")
        self.layout = layout_of(model)
        self._call = torch.compile(model, dynamic=False) if compiled else model
        self._prefill = self._call if compiled else model.base_model

    def __call__(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor | None]:
        outputs, states = self._run_masked(self._call, rows, kv, taps, columns)
        return outputs.logits[0], states

    def prefill(self, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> Tensor | None:
        states: Tensor | None = self._run_masked(self._prefill, rows, kv, taps, columns)[1]
        return states

    def _run_masked(self, call: Any, rows: Pass, kv: Tensor, taps: tuple[int, ...], columns: int) -> tuple[Any, Any]:
        seen = visible(rows.length, rows.mask, columns)
        with pass_lock(self.model), tree_attention(self.model):
            mask = as_given(seen[None, None], self.model)
            return self._run(call, rows, taps, mask, PassCache(self.layout, kv, rows.slots, columns))


def layout_of(model: Any) -> KvLayout:
    """The shapes of a model's keys and values, from a forward: configurations do not always have them."""
    decoder = Decoder(model)
    decoder.reset(1)
    decoder.extend([[0]])
    layers = decoder.cache.layers
    return KvLayout(tuple(layer_shape(layer.keys, layer.values) if layer.is_initialized else None for layer in layers))
