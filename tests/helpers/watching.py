"""Policies that watch the tree, on the host and on the device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from helpers.classifiers import answering, put, some_classifier
from helpers.gpu import LENGTH, LONG, PRECISE, drafter
from helpers.ltd import random_pair
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.engine.engine import Engine, Generation
from windfall.model.target import Target
from windfall.policies.base import TreePolicy
from windfall.policies.papers import ltd

BEAM = {"depth": 6, "k": 4, "nodes": 20}


PAIRS = [("llama", "eagle3-pruned"), ("qwen3", "eagle"), ("gpt-neox", "lm"), ("llama", "itself")]


NETWORKS: dict[str, tuple[int, dict[str, Any]]] = {  # seed and rules
    "ltd": (7, {}),
    "ltd-padded": (7, {"layout": "padded"}),
    "ltd-release": (3, {"layout": "release", "parts": "PDLE", "activation": "tanh", "asked_every": 2}),
    "ltd-entropies": (10, {"parts": "PDLE"}),
    "ltd-depth": (7, {}),
    "ltd-size": (5, {}),
    "ltd-neither": (0, {}),
}


MISSING = {"ltd-depth": ("size",), "ltd-size": ("depth",), "ltd-neither": ("depth", "size")}


def policy(name: str, folder: Path) -> TreePolicy:
    if name == "svip":
        return registry.policy("svip", **BEAM)
    if name == "disco":
        return registry.policy("disco", **BEAM, path=put(some_classifier("disco", 4), folder))
    if name == "specdecpp":
        path = put(some_classifier("specdecpp", 2), folder)
        return registry.policy("specdecpp", **BEAM, least=3, threshold=0.97, path=path)
    if name.startswith("c2t"):
        strict = answering("c2t", 20.0, bias=-1.0)  # a path's probability must be above 0.05
        path = put(strict if name == "c2t" else some_classifier("c2t", 4, entropy=True), folder)
        return registry.policy("c2t", **BEAM, beta=0.5, path=path)
    seed, rules = NETWORKS[name]
    made = random_pair(seed, k=4, max_depth=6, size_step=5, size_actions=4, fixed_depth=4, fixed_size=9, **rules)
    ltd.save(replace(made, **dict.fromkeys(MISSING.get(name, ()))), folder, {})
    return registry.policy("ltd", path=str(folder))


@cache
def target_of(family: str) -> Target:
    return Target(tiny(family, dtype=PRECISE))


def both(family: str, kind: str, own: TreePolicy, coupled: bool = True, **sampling: Any) -> list[Generation]:
    """The same text on the host path and on fixed buffers."""
    target = target_of(family)
    made = [
        Engine(target, drafter(kind), own, coupled, gpu_options=GpuOptions(graphs, exact=False))
        for graphs in (False, True)
    ]
    length = LONG if kind == "itself" or sampling else LENGTH  # cycles take several tokens
    found = [each.generate(prompt(), max_new_tokens=length, eos=(), **sampling) for each in made]
    assert made[1].fallback == "" and made[1].gpu_runner is not None
    assert found[0].token_ids == found[1].token_ids
    return found
