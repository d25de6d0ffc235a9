"""A captured graph goes on reading the buffers of its capture: the same key must mean the same, living buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.gpu import engine
from helpers.tiny import prompt
from windfall import registry
from windfall.engine.gpu.graphs import GraphCache, Key


class Buffers(TorchDispatchMode):
    """Collects the tensors that work reads or writes but did not make."""

    def __init__(self) -> None:
        super().__init__()
        self.own: set[int] = set()
        self.given: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = "lift_fresh" in str(func)  # a Python number becomes a tensor
        for storage in () if number else storages((args, kwargs)):
            if storage.data_ptr() not in self.own:
                self.given[storage.data_ptr()] = storage
        made = func(*args, **(kwargs or {}))
        self.own |= {storage.data_ptr() for storage in storages(made)} - self.given.keys()
        return made


def storages(given: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(given, torch.Tensor):
        yield given.untyped_storage()
    elif isinstance(given, list | tuple | dict):
        for each in given.values() if isinstance(given, dict) else given:
            yield from storages(each)


def test_graphs_read_buffers_that_live_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run of a key finds what the first one made, as a capture does."""
    runs: dict[Key, int] = {}
    known: dict[Key, list[weakref.ref[torch.UntypedStorage]]] = {}

    def run(self: GraphCache, key: Key, work: Callable[[], None]) -> None:
        runs[key] = runs.get(key, 0) + 1
        assert all(each() is not None for each in known.get(key, ())), key
        with Buffers() as buffers:
            work()
        if runs[key] == 2:
            known[key] = [weakref.ref(storage) for storage in buffers.given.values()]

    monkeypatch.setattr(GraphCache, "run", run)
    device = engine("llama", "itself", "beam", graphs=True, max_position_embeddings=1024)
    device.policy = registry.policy("auto")
    for length in (9, 9, 530, 9):
        device.generate_batch([prompt(length), prompt(12)], max_new_tokens=4, eos=())
    assert device.batch_fallback == "" and sum(count > 2 for count in runs.values()) >= 4
