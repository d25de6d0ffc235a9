"""Small trained classifiers of draft trees: their inputs, networks and files.

The policies `disco`, `specdecpp` and `c2t` ask them; `windfall train classifier` makes them. They run in numpy."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from windfall.core.errors import InputError
from windfall.core.files import WEIGHTS, make_folder, replace_file, replace_text
from windfall.core.tree import DraftTree

Floats = NDArray[np.float32]

SHIPPED = WEIGHTS / "classifiers"
TOP = 10  # probabilities shown; fewer are filled up with zeros
SCALE = 10.0  # depths are divided by this
HALF = np.float32(0.5)


# ---- inputs


class LevelView(Protocol):
    """What the classifiers read of each level of a beam: a TreeView, or a finished tree through BeamView."""

    def scores(self, level: int) -> Floats: ...
    def parent_score(self, level: int) -> float: ...
    def logq(self, level: int) -> Floats: ...
    def entropies(self, level: int) -> Floats: ...


class BeamView:
    """The levels of a whole tree that a beam drafted."""

    def __init__(self, tree: DraftTree):
        self._own = tree.arrays

    def _parent(self, level: int) -> int:
        """The likeliest node of the previous level that the beam expanded."""
        nodes = np.flatnonzero(self._own.depth == level - 1)
        return int(nodes[self._own.score[nodes].argmax()])

    def scores(self, level: int) -> Floats:
        found: Floats = self._own.score[self._own.depth == level]
        return found

    def parent_score(self, level: int) -> float:
        return float(self._own.score[self._parent(level)])

    def logq(self, level: int) -> Floats:
        found: Floats = self._own.logq[self._own.parents == self._parent(level)]
        return found

    def entropies(self, level: int) -> Floats:
        return np.nan_to_num(self._own.entropy[[self._parent(level)]])


def disco_inputs(view: LevelView, level: int) -> Floats:
    """[TOP + 2] the path probabilities of a level's likeliest nodes, the drafter's entropy before them, the depth."""
    return _inputs(view.scores(level), float(view.entropies(level)[0]), level / SCALE)


def specdecpp_inputs(view: LevelView, level: int) -> Floats:
    """[TOP + 3] for the likeliest node that was expanded: the probabilities of its children and their entropy, its own
    path probability, and the depth. They replace the drafter's hidden state, which the paper uses."""
    return _inputs(view.logq(level), float(view.entropies(level)[0]), math.exp(view.parent_score(level)), level / SCALE)


def c2t_inputs(tree: DraftTree, nodes: torch.Tensor, entropy: bool) -> Floats:
    """[n, 2 or 3] each node's path probability, perhaps the entropy of what it was drawn from, its depth."""
    columns = [tree.score[nodes].exp(), tree.depth[nodes] / SCALE]
    if entropy:
        columns.insert(1, tree.entropy[tree.parents[nodes]].nan_to_num(0.0))
    return torch.stack(columns, 1).numpy().astype(np.float32)


def _inputs(scores: Floats, *more: float) -> Floats:
    """[TOP + n] the highest of these log-probabilities as probabilities, descending, then further numbers."""
    found = np.zeros(TOP + len(more), dtype=np.float32)
    highest = np.sort(scores)[: -TOP - 1 : -1]
    np.exp(highest, out=found[: len(highest)])
    found[TOP:] = more
    return found


# ---- kinds


def relu(x: Floats) -> Floats:
    return np.maximum(x, np.float32(0))  # type: ignore[no-any-return]


def sigmoid(x: Floats) -> Floats:
    return HALF + HALF * np.tanh(HALF * x)  # type: ignore[no-any-return]  # exp would overflow


def silu(x: Floats) -> Floats:
    return x * sigmoid(x)


class Kind(NamedTuple):
    """A published classifier: the shape that LTD gives it, and how long LTD trains it."""

    inputs: tuple[str, ...]
    hidden: int
    epochs: int
    bend: Callable[[Floats], Floats]
    skip: bool = False  # whether the inputs also reach the output directly
    frequencies: bool = False  # whether its output is used as a probability, not compared with 0.5
    asks: str = ""


_PROBABILITIES = tuple(f"probability {place}" for place in range(1, TOP + 1))
KINDS = {
    "disco": Kind((*_PROBABILITIES, "entropy", "depth"), 128, 50, relu, asks="does the accepted path reach a level?"),
    "specdecpp": Kind(
        (*_PROBABILITIES, "entropy", "path probability", "depth"),
        1024,
        5,
        silu,
        skip=True,
        frequencies=True,  # its policy multiplies them
        asks="does the accepted path reach a level, if it reached the one before?",
    ),
    "c2t": Kind(("path probability", "depth"), 64, 50, relu, asks="is a node accepted?"),
}


def kind_named(name: str) -> Kind:
    if name not in KINDS:
        raise InputError(f"there is no classifier '{name}'; choose from {', '.join(KINDS)}")
    return KINDS[name]


def inputs_of(name: str, entropy: bool = False) -> tuple[str, ...]:
    """The names of a kind's inputs; with `entropy`, of C2T with the input that LTD leaves out."""
    own = kind_named(name).inputs
    if entropy and name != "c2t":
        raise InputError(f"entropy is an option of c2t; {name} always has it")
    return (own[0], "entropy", own[1]) if entropy else own


# ---- the network


@dataclass(frozen=True)
class Classifier:
    """Inputs [..., I] → probability [...]: one hidden layer, and for SpecDec++ a skip connection."""

    kind: str
    inputs: tuple[str, ...]
    weights: dict[str, Floats]  # hidden [H, I], hidden_bias [H], output [H], output_bias [1], skip [I] if any

    def __call__(self, inputs: Floats) -> Floats:
        own = self.weights
        hidden = KINDS[self.kind].bend(inputs @ own["hidden"].T + own["hidden_bias"])
        score = hidden @ own["output"] + own["output_bias"][0]
        if "skip" in own:
            score = score + inputs @ own["skip"]
        return sigmoid(score)

    @property
    def entropy(self) -> bool:
        return "entropy" in self.inputs

    def check(self) -> None:
        """Refuse (ValueError) matrices that do not fit together."""
        known, own = kind_named(self.kind), self.weights
        shapes = {name: array.shape for name, array in own.items()}
        width, (size, *_) = len(self.inputs), shapes["output"]
        wanted: dict[str, Any] = {"hidden": (size, width), "hidden_bias": (size,), "output": (size,)}
        wanted |= {"output_bias": (1,)} | ({"skip": (width,)} if known.skip else {})
        if shapes != wanted or not all(np.isfinite(array).all() for array in own.values()):
            raise ValueError(f"its matrices are {shapes}, not {wanted}, or hold no numbers")
        if self.inputs not in (known.inputs, inputs_of(self.kind, self.kind == "c2t")):
            raise ValueError("its inputs are not those of its kind")


# ---- files


def files_of(kind: str, path: Path) -> tuple[Path, Path]:
    """The files with the weights and the card of a classifier, given its folder or its file."""
    weights = path / f"{kind}.safetensors" if path.is_dir() else path
    return weights, weights.with_suffix(".json")


def load(kind: str, path: str | None) -> Classifier:
    """The classifier of this kind in a file or folder; None: the one that comes with the package."""
    where = SHIPPED if path is None else Path(path)
    weights, card = files_of(kind, where)
    if not weights.is_file():
        train = f"`windfall train classifier --kind {kind} --out DIR` makes one, for --set path=DIR"
        what = f"no {kind} classifier comes with this package" if path is None else f"there is no '{weights}'"
        raise InputError(f"{what}; {train}")
    return _read(kind, weights, card, weights.stat().st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _read(kind: str, weights: Path, card: Path, changed: int) -> Classifier:
    """Read a file once; `changed` is its modification time, so that a new version is read again."""
    from safetensors.numpy import load_file

    try:
        told = json.loads(card.read_text("utf-8"))
        arrays = {name: array.astype(np.float32) for name, array in load_file(str(weights)).items()}
        found = Classifier(str(told["kind"]), tuple(told["inputs"]), arrays)
        found.check()
    except FileNotFoundError as error:
        raise InputError(
            f"'{weights}' lacks its card, {card.name}, which `windfall train classifier` writes"
        ) from error
    except Exception as error:  # safetensors has errors of its own
        raise InputError(f"'{weights}' or {card.name} is damaged: {' '.join(str(error).split())[:200]}") from error
    if found.kind != kind:
        raise InputError(f"'{weights}' is a classifier for {found.kind}, not {kind}")
    return found


def save(classifier: Classifier, folder: Path, card: dict[str, Any]) -> None:
    """Write the weights, and then the card that describes them."""
    from safetensors.numpy import save_file

    make_folder(folder)
    weights, told = files_of(classifier.kind, folder)
    arrays = {name: np.ascontiguousarray(array) for name, array in classifier.weights.items()}
    replace_file(weights, lambda temporary: save_file(arrays, str(temporary)))
    about = {"kind": classifier.kind, "inputs": list(classifier.inputs), **card}
    replace_text(told, json.dumps(about, indent=2) + "\n")
