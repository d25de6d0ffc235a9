"""The KV cache of the host loop."""

from __future__ import annotations

import gc
import weakref

import torch

from windfall.model.kv_cache import KVCache


def test_a_cache_that_is_dropped_is_freed_at_once() -> None:
    cache = KVCache(layers=2, batch=1)
    rows = torch.ones(1, 2, 3, 4)
    cache.layers[0].update(rows, rows)
    keys = weakref.ref(cache.layers[0].keys)
    gc.collect()
    gc.disable()  # it would find a cycle of a cache and its layers
    try:
        del cache
        assert keys() is None
    finally:
        gc.enable()
