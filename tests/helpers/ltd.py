"""Random networks of Learning to Draft, and a recording of a tiny engine."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from helpers.random_heads import random_head
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.costs.curves import Costs
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target
from windfall.policies.papers import ltd
from windfall.policies.papers.ltd import NOTHING, Network, Pair, Rules, View
from windfall.train.rl.recording import Recording, record

H200 = Costs.simple(0.06e-3, (1, 64, 240), (1.0e-3, 1.3e-3, 2.0e-3), 0.1e-3)
TOKENS = 12  # of a recorded text
TEXTS = [(str(seed), prompt(7 + seed, seed=seed)) for seed in range(3)]


def network(layout: ltd.Layout, actions: int, seed: int = 0, width: int = 24, activation: str = "relu") -> Network:
    random = np.random.default_rng(seed)
    sizes = [layout.size, width, actions]
    layers = [
        (random.standard_normal((out, own)).astype(np.float32) / 4, random.standard_normal(out).astype(np.float32))
        for own, out in pairwise(sizes)
    ]
    return Network(layers, layout, activation)


def random_pair(seed: int = 0, **rules: Any) -> Pair:
    made = Rules(**rules)
    return Pair(
        made,
        network(made.depth_layout, 2, seed, activation=made.activation),
        network(made.size_layout, made.size_actions, seed + 1, activation=made.activation),
    )


def view(scores: Any, length: int = 250, depth: int = 3, entropy: Any = NOTHING) -> View:
    return View(np.asarray(scores, dtype=np.float32), length, depth, np.asarray(entropy, dtype=np.float32))


@cache
def engine() -> Engine:
    """Uncoupled, because a coupled drafter depends on the calibrator, which changes over time."""
    return Engine(Target(tiny()), FeatureHeadDrafter(model=random_head()), registry.policy("none"), coupled=False)


@cache
def recorded(temperature: float = 0.0) -> Recording:
    """The widest beams (depth 5, width 3) at every position of TEXTS."""
    made = [*record(engine(), TEXTS, depth=5, k=3, max_new_tokens=TOKENS, temperature=temperature)]
    whole = made[0]
    for each in made[1:]:
        whole = whole.joined(each)
    return whole
