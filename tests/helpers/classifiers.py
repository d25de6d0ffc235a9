"""Small classifiers with chosen answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from windfall.policies.papers import classifiers
from windfall.policies.papers.classifiers import KINDS, Classifier


def some_classifier(kind: str, seed: int = 0, hidden: int = 6, entropy: bool = False) -> Classifier:
    chance, inputs = np.random.default_rng(seed), classifiers.inputs_of(kind, entropy)
    shapes = {"hidden": (hidden, len(inputs)), "hidden_bias": (hidden,), "output": (hidden,), "output_bias": (1,)}
    shapes |= {"skip": (len(inputs),)} if KINDS[kind].skip else {}
    return Classifier(kind, inputs, {k: chance.normal(size=shape).astype(np.float32) for k, shape in shapes.items()})


def answering(kind: str, *weights: float, bias: float = 0.0, entropy: bool = False) -> Classifier:
    """σ(weights · inputs + bias), for inputs that are not negative."""
    inputs = classifiers.inputs_of(kind, entropy)
    given = np.array([*weights, *[0.0] * (len(inputs) - len(weights))], dtype=np.float32)
    size = len(inputs)
    own = {"hidden": np.eye(size, dtype=np.float32), "hidden_bias": np.zeros(size, np.float32)}
    own |= {"output": given, "output_bias": np.array([bias], np.float32)}
    if KINDS[kind].skip:  # all goes the direct way
        own |= {"skip": given, "output": np.zeros(size, np.float32)}
    return Classifier(kind, inputs, own)


def put(classifier: Classifier, folder: Path) -> str:
    classifiers.save(classifier, folder, {})
    return str(folder)


def entropy(*chances: float) -> float:
    return float(-(np.array(chances) * np.log(chances)).sum())
