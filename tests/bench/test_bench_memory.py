"""The memory of a method alone, on a pretended card: what is counted, and what others left there is not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from windfall.bench.memory import WARM_UP_TOKENS, held_by_graphs, peak_apart
from windfall.core.types import SamplingParams

WEIGHTS, OTHERS, WORKSPACE, OWN = 4 * 10, 5000, 700, 100
PARAMS = SamplingParams(max_new_tokens=32)


class Card:
    """Bytes as torch's allocator counts them, and the private pools of graphs: by name, all and allocated bytes."""

    def __init__(self) -> None:
        self.allocated = self.peak = OTHERS
        self.pools: dict[object, tuple[int, int]] = {"others": (900, 100)}
        self.cleared: list[str] = []
        self.warm = False

    def take(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def release(self, name: object) -> None:
        """An engine is gone."""
        self.take(-OWN)
        self.pools.pop(name, None)

    def reset(self, device: torch.device) -> None:
        self.peak = self.allocated

    def snapshot(self) -> list[dict[str, Any]]:
        pools = [
            {"device": 1, "segment_pool_id": (0, place + 1), "total_size": total, "allocated_size": own}
            for place, (total, own) in enumerate(self.pools.values())
        ]
        common = {"device": 1, "segment_pool_id": (0, 0), "total_size": 10**6, "allocated_size": 1}
        return [common, *pools, {**pools[0], "device": 0}]


class Engine:
    """It has weights of its own; its first answer takes memory for a moment, to record passes, of which some stays."""

    def __init__(self, card: Card, recording: int, graph: int, replaying: int):
        self.card, self.sizes = card, (recording, graph, replaying)
        self.asked: list[int] = []
        self.itself = self  # it goes when garbage is collected
        self.name = object()
        card.take(OWN)
        weakref.finalize(self, card.release, self.name)

    def decode(self, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        card, (recording, graph, replaying) = self.card, self.sizes
        if not card.warm:  # the first engine of all
            card.take(3000)
            card.take(WORKSPACE - 3000)
            card.warm = True
        for size in (replaying,) if self.asked else (recording, replaying):
            card.take(size)
            card.take(-size)
        if graph:
            card.pools[self.name] = (graph, 0)
        self.asked.append(params[0].max_new_tokens)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    made = Card()
    patched: dict[str, Callable[..., Any]] = {
        "memory_allocated": lambda device: made.allocated,
        "max_memory_allocated": lambda device: made.peak,
        "reset_peak_memory_stats": made.reset,
        "memory_snapshot": made.snapshot,
        "current_device": lambda: 1,
        "synchronize": lambda device: made.cleared.append("synchronize"),
        "empty_cache": lambda: made.cleared.append("empty_cache"),
    }
    for name, function in patched.items():
        monkeypatch.setattr(torch.cuda, name, function)
    gc.freeze()  # collecting garbage takes long with all of torch in memory
    yield made
    gc.unfreeze()


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize(
    ("recording", "graph", "replaying", "most"),
    [
        (80, 64, 30, OWN + 30 + 64),  # a graph's memory is the graph's, allocated or not
        (300, 64, 30, OWN + 300),  # loading and recording take the most
        (80, 0, 80, OWN + 80),  # nothing is recorded
    ],
)
def test_the_memory_of_a_method_alone(
    recording: int, graph: int, replaying: int, most: int, device: str, card: Card
) -> None:
    make: Any = partial(Engine, card, recording, graph, replaying)
    target: Any = SimpleNamespace(device=torch.device(device), model=torch.nn.Linear(10, 1, bias=False))
    for _ in range(2):  # the first engine of a process needs no more than the second
        assert peak_apart(target, make, [1, 2], PARAMS) == WEIGHTS + most
    assert card.allocated == OTHERS + WORKSPACE and list(card.pools) == ["others"]
    assert card.cleared == ["synchronize", "empty_cache"] * 4


def test_the_warm_up_is_short(card: Card) -> None:
    asked: list[list[int]] = []

    def make() -> Any:
        made = Engine(card, 1, 1, 1)
        asked.append(made.asked)
        return made

    target: Any = SimpleNamespace(device=torch.device("cuda"), model=torch.nn.Linear(1, 1))
    peak_apart(target, make, [1], PARAMS)
    peak_apart(target, make, [1], SamplingParams(max_new_tokens=3))
    assert asked == [[WARM_UP_TOKENS], [32, 32], [3], [3, 3]]


def test_graphs_hold_what_is_free_in_their_pools(card: Card) -> None:
    assert held_by_graphs(torch.device("cuda")) == held_by_graphs(torch.device("cuda:1")) == 800
    assert held_by_graphs(torch.device("cuda:0")) == 800 and held_by_graphs(torch.device("cuda:2")) == 0
