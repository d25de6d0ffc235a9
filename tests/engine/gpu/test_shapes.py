"""Trees of known form on fixed buffers: the same texts, passes and rows as where the host lays them out."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.cli import character_tokenizer
from helpers.gpu import LENGTH, PRECISE, drafter, paths
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.engine.engine import Engine, Generation
from windfall.model.target import Target
from windfall.policies.shape import Shape
from windfall.policies.static import SHAPES, Static

POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("static", {}),
    ("static", {"shape": "medusa"}),
    ("static", {"shape": "[[0],[3],[0,0],[3,1],[3,1,2]]"}),
    ("specinfer", {"widths": "1,3,2,1"}),
    ("sequoia", {"nodes": 16, "depth": 4}),
    ("sequoia", {"nodes": 20, "depth": 5, "sizing": "largest"}),
    ("gt-static", {"c": 0.05, "cap": 5}),
]


def generate(policy: Any, kind: str, graphs: bool, **sampling: Any) -> tuple[Generation, Engine]:
    target = Target(tiny("llama", dtype=PRECISE), character_tokenizer())
    engine = Engine(target, drafter(kind), policy, True, gpu_options=GpuOptions(graphs, exact=False))
    return engine.generate(prompt(), max_new_tokens=LENGTH, eos=(), **sampling), engine


@pytest.mark.parametrize(
    ("name", "settings", "kind"),
    [*((*each, "eagle3") for each in POLICIES), *((*each, "lm") for each in POLICIES[::2])],
)
def test_the_device_has_the_same_trees(name: str, settings: dict[str, Any], kind: str) -> None:
    wanted, _ = generate(registry.policy(name, **settings), kind, False)
    found, engine = generate(registry.policy(name, **settings), kind, True)
    assert engine.fallback == "" and found.token_ids == wanted.token_ids
    said = compared = 0
    for one, other in zip(wanted.steps, found.steps, strict=False):
        if LENGTH - said <= 8:  # the device does not know how much room is left
            break
        assert paths(one.tree) == paths(other.tree) and one.draft_passes == other.draft_passes
        said, compared = said + len(one.tokens), compared + 1
    assert compared > 2


def test_noise_changes_no_text() -> None:
    wanted, _ = generate(Static(), "eagle3", False, temperature=1.0, seed=3)
    found, engine = generate(Static(), "eagle3", True, temperature=1.0, seed=3)
    assert engine.fallback == "" and found.token_ids == wanted.token_ids


class Moody(Static):
    """Another tree for every cycle."""

    def layout(self, ctx: Any) -> Shape:
        return (SHAPES["eagle-1"], SHAPES["medusa"])[ctx.length % 2]

    @property
    def most(self) -> tuple[int, int, int]:
        return 5, 10, 64


def test_a_shape_may_change_in_every_cycle() -> None:
    wanted, _ = generate(Static(), "eagle3", False)
    found, engine = generate(Moody(), "eagle3", True)
    assert engine.fallback == "" and found.token_ids == wanted.token_ids
    sizes = [len(step.tree) for step in found.steps]
    assert set(sizes) == {26, 64}


def test_wide_forms_stay_with_the_host() -> None:
    wanted, _ = generate(registry.policy("specinfer", widths="5,5,2"), "eagle3", False)
    found, engine = generate(registry.policy("specinfer", widths="5,5,2"), "eagle3", True)
    assert engine.fallback and found.token_ids == wanted.token_ids
