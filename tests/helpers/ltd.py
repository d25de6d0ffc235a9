"""Random networks of Learning to Draft."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from windfall.policies.papers import ltd
from windfall.policies.papers.ltd import Network, Pair, Rules


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
