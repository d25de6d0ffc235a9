"""Learning to Draft (Zhang et al. 2025): two small networks say when to stop drafting and how much to verify."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from windfall.core import options
from windfall.core.errors import InputError
from windfall.core.files import WEIGHTS, make_folder, replace_file
from windfall.core.options import option
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context
from windfall.policies.plan import Decision, Plan, TreeView

Array = np.ndarray[Any, np.dtype[np.float32]]
Layers = list[tuple[Array, Array]]  # weight [out, in] and bias [out] of each

SHIPPED = WEIGHTS / "ltd"
FILE = "policy.safetensors"
ABOUT = "windfall_ltd"  # key of the file's metadata
FLOOR = 20.0  # the log-probability that stands for a missing candidate is minus this
SPAN = 8.0  # ranked log-probabilities from -SPAN to 0 are scaled to 0 … 1; lower ones count as missing
FEW = 128  # up to this many candidates, multiplying all is quicker than searching for the first unlikely one
ZERO: Array = np.zeros((), dtype=np.float32)
NOTHING: Array = np.zeros(0, dtype=np.float32)
MISSING = {  # by layout: the log-probability that stands for a missing candidate, its unit, and the least one shown
    "ranked": (-SPAN, SPAN, -SPAN),
    "padded": (-FLOOR, 1.0, -FLOOR),
    "release": (0.0, 1.0, -np.inf),
}
BENDS: dict[str, Any] = {"relu": partial(np.maximum, ZERO), "tanh": np.tanh}
CONSTANT = 10  # the text length that the release shows its depth policy at inference, for every text


# ---- what training and inference agree on


@dataclass(frozen=True)
class Rules:
    """The beam, the questions put to the two networks, and how a tree becomes numbers for them."""

    k: int = option(10, "beam width, and children of a node", low=1)
    max_depth: int = option(12, "maximum draft passes (paper 12; release 12 loops, which is 13)", low=1)
    forced: int = option(2, "draft passes before the depth policy is asked", low=1)
    asked_every: int = option(
        1, "at inference, passes between two questions to the depth policy (paper 1, release 3)", low=1
    )
    size_actions: int = option(12, "sizes to choose from (paper 12, release 24)", low=1)
    size_step: int = option(20, "drafted nodes between them (paper 20, release 10)", low=1)
    activation: str = option("relu", "of hidden layers (paper relu, release tanh)", choices=("relu", "tanh"))
    layout: str = option(
        "ranked",
        "candidates best first, from 0 to 1; as drafted, padded with a low value; or as drafted, with 0 (release)",
        choices=("ranked", "padded", "release"),
    )
    parts: str = option(
        "PDL",
        "what is observed: probabilities, depth, length, entropies",
        choices=("P", "PL", "PD", "PDL", "PDLE"),
    )
    constant_length: bool = option(False, "at inference, show the depth policy one length for all texts, as released")
    fixed_depth: int = option(8, "draft passes where there is no depth policy", low=1)
    fixed_size: int = option(60, "drafted nodes to verify where there is no size policy", low=1)

    def __post_init__(self) -> None:
        options.check(self)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Drafted nodes to verify, the root not counted, by action."""
        return tuple(self.size_step * (action + 1) for action in range(self.size_actions))

    def asks(self, passes: int) -> bool:
        """Whether the depth policy is asked after this many draft passes."""
        return passes in self._asked

    @cached_property
    def _asked(self) -> frozenset[int]:
        return frozenset(n for n in range(self.forced, self.max_depth) if (n - 1) % self.asked_every == 0)

    @property
    def depth_layout(self) -> Layout:
        return Layout(self.k * self.k, 14, self.k, self.layout, self.parts)

    @property
    def size_layout(self) -> Layout:
        """Room for a first pass and twelve of the beam: 1210 candidates at a width of 10."""
        return Layout(self.k + 12 * self.k * self.k, 29, 1 + 12 * self.k, self.layout, self.parts)


class View(NamedTuple):
    """What is known about a cycle when a network is asked."""

    scores: Array  # [n] cumulative log-probabilities of the candidates, as drafted
    length: int  # committed tokens
    depth: int  # draft passes so far
    entropy: Array  # [m] nats, after the expanded nodes; empty if it was not requested


@dataclass(frozen=True)
class Layout:
    """The input vector: [candidates | copies of length/1000 | copies of depth/10 | entropies]."""

    candidates: int
    copies: int
    entropies: int
    kind: str
    parts: str

    @property
    def size(self) -> int:
        return self.candidates + 2 * self.copies + (self.entropies if "E" in self.parts else 0)

    @property
    def padding(self) -> float:
        return -FLOOR if self.kind == "padded" else 0.0

    def shown(self, scores: Array) -> Array:
        """The candidates in the form that the vector has."""
        if self.kind == "release":
            return scores[: self.candidates]
        if self.kind == "padded":
            return scores[: self.candidates].clip(min=-FLOOR)
        likely = np.sort(scores[scores > -SPAN])[::-1][: self.candidates]
        ranked: Array = likely / np.float32(SPAN) + np.float32(1)
        return ranked

    def fitting(self, scores: Array) -> Array:
        """As many candidates as the vector has places for."""
        return np.sort(scores)[-self.candidates :] if self.kind == "ranked" else scores[: self.candidates]

    def length(self, tokens: int) -> float:
        return tokens / 1000 if "L" in self.parts else 0.0

    def depth(self, passes: int) -> float:
        return passes / 10 if "D" in self.parts else 0.0

    def entropy(self, view: View) -> Array:
        return view.entropy[: self.entropies] if "E" in self.parts else view.entropy[:0]

    def vector(self, view: View) -> Array:
        """The whole vector, [size]."""
        whole = np.zeros(self.size, dtype=np.float32)
        shown, entropy = self.shown(view.scores), self.entropy(view)
        whole[: self.candidates] = self.padding
        whole[: len(shown)] = shown
        whole[self.candidates : self.candidates + self.copies] = self.length(view.length)
        whole[self.candidates + self.copies : self.candidates + 2 * self.copies] = self.depth(view.depth)
        whole[self.candidates + 2 * self.copies :][: len(entropy)] = entropy
        return whole


class Network:
    """A multi-layer perceptron in numpy for one input vector at a time.

    The weights of padding, copies and scaling are summed in advance, so the first layer multiplies only [candidates in
    reverse order | 1 | length | depth | entropies]. Calls write into buffers of the object: each thread needs its own
    `twin`.
    """

    def __init__(self, layers: Layers, layout: Layout, activation: str):
        self.layers, self.layout, self.activation = layers, layout, activation
        places, copies, bias = layout.candidates, layout.copies, layers[0][1].astype(np.float64)
        first = layers[0][0].T.astype(np.float64)  # [in, out]
        lengths, depths, entropies = np.split(first[places:], (copies, 2 * copies))
        missing, scale, least = MISSING[layout.kind]
        candidates = first[:places][::-1] / scale
        so_far = np.vstack([np.zeros_like(bias), candidates.cumsum(0)])
        known = bias + (scale * layout.padding - missing) * so_far[-1]
        told = [known, layout.length(1) * lengths.sum(0), layout.depth(1) * depths.sum(0)]
        self._weights = _singles(np.vstack([candidates, *told, entropies]))
        self._missing = _singles(missing * so_far)  # [candidates + 1, out], by how many of them are missing
        self._least = _singles(np.array(least))
        self._rest = [_singles(np.vstack([weight.T, bias])) for weight, bias in layers[1:]]  # [in + 1, out]
        self._ahead: Array | None = None  # with two actions: the difference of their weights
        if self._rest[-1].shape[1] == 2:
            self._ahead = _singles(self._rest[-1][:, 1] - self._rest[-1][:, 0])
        self._bend = BENDS[activation]
        self._make_room()

    def _make_room(self) -> None:
        """Allocate the input and hidden layers; each ends in a 1, which multiplies the bias of the next layer."""
        self._given: Array = np.zeros(len(self._weights), dtype=np.float32)
        self._given[self.layout.candidates] = 1
        rooms: list[Array] = [np.ones(len(weight), dtype=np.float32) for weight in self._rest]
        self._opening, self._ending = rooms[0][:-1], rooms[-1]
        steps = zip(self._rest[:-1], pairwise(rooms), strict=True)
        self._between = [(before, weight, after[:-1]) for weight, (before, after) in steps]

    def twin(self) -> Network:
        """The same network with its own buffers."""
        made = copy(self)
        made._make_room()
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Network:
        return self.twin()  # its buffers are views of each other, which a deep copy would lose

    def choose(self, view: View) -> int:
        """The likeliest action."""
        if self._ahead is not None:
            return 1 if self._last(view).dot(self._ahead) > 0 else 0
        return int(self.logits(view).argmax())

    def logits(self, view: View) -> Array:
        found: Array = self._last(view).dot(self._rest[-1])
        return found

    def _last(self, view: View) -> Array:
        """The input of the last layer."""
        self._bend(self._first(view), out=self._opening)
        for before, weight, after in self._between:
            self._bend(before.dot(weight, after), out=after)
        return self._ending

    def _first(self, view: View) -> Array:
        """The first layer applied to layout.vector(view), without building that vector."""
        layout, given = self.layout, self._given
        places, scores = layout.candidates, view.scores
        missing = places - len(scores)
        if missing < 0:
            scores, missing = layout.fitting(scores), 0
        shown = given[missing:places]
        if layout.kind == "ranked":
            np.maximum(scores, self._least, out=shown)
            shown.sort()
            if places > FEW:
                missing += int(shown.searchsorted(self._least, "right"))
        else:
            np.maximum(scores[::-1], self._least, out=shown)
        given[places + 1], given[places + 2] = view.length, view.depth
        if len(given) > places + 3:
            entropy = layout.entropy(view)
            given[places + 3 :] = 0
            given[places + 3 : places + 3 + len(entropy)] = entropy
        if not missing:
            return given.dot(self._weights, self._opening)
        hidden = given[missing:].dot(self._weights[missing:], self._opening)
        hidden += self._missing[missing]
        return hidden


def _singles(numbers: np.ndarray[Any, Any]) -> Array:
    """In single precision, row by row."""
    return np.array(numbers, dtype=np.float32, order="C")


@dataclass(frozen=True)
class Pair:
    """The two policies and the rules they were trained for; either policy may be missing."""

    rules: Rules = Rules()
    depth: Network | None = None
    size: Network | None = None

    def stops(self, view: View) -> bool:
        """Whether to stop drafting after this pass."""
        rules = self.rules
        if self.depth is None:
            return view.depth >= min(rules.fixed_depth, rules.max_depth)
        if not rules.asks(view.depth):
            return view.depth >= rules.max_depth
        return self.depth.choose(view._replace(length=CONSTANT) if rules.constant_length else view) == 0

    def nodes(self, view: View) -> int:
        """How many of the drafted nodes to verify."""
        if self.size is None:
            return self.rules.fixed_size
        if len(view.scores) <= self.rules.size_step:
            return self.rules.size_step  # all are verified
        return self.rules.sizes[self.size.choose(view)]


# ---- files


def save(pair: Pair, folder: Path, about: Mapping[str, Any]) -> None:
    """One file, written whole or not at all; numbers in half precision."""
    from safetensors.numpy import save_file

    tensors = {}
    for name, network in (("depth", pair.depth), ("size", pair.size)):
        for place, (weight, bias) in enumerate(network.layers if network else []):
            tensors[f"{name}.{place}.weight"] = np.ascontiguousarray(weight, dtype=np.float16)
            tensors[f"{name}.{place}.bias"] = np.ascontiguousarray(bias, dtype=np.float16)
    told = json.dumps({**about, "rules": asdict(pair.rules)})
    make_folder(folder)
    replace_file(folder / FILE, lambda temporary: save_file(tensors, str(temporary), {ABOUT: told}))


def load(folder: Path) -> Pair:
    """What `save` wrote."""
    file = folder / FILE
    if not file.is_file():
        raise InputError(f"'{folder}' holds no trained policies ({FILE}); train some with: windfall train ltd")
    pair = _load(file, file.stat().st_mtime_ns)
    return Pair(pair.rules, pair.depth and pair.depth.twin(), pair.size and pair.size.twin())


@lru_cache(maxsize=32)
def _load(file: Path, changed: int) -> Pair:
    try:
        with safe_open(str(file), framework="np") as tensors:
            rules = Rules(**json.loads(tensors.metadata()[ABOUT])["rules"])
            found = {name: tensors.get_tensor(name).astype(np.float32) for name in tensors.keys()}  # noqa: SIM118
        shapes = {"depth": (rules.depth_layout, 2), "size": (rules.size_layout, rules.size_actions)}
        made = {name: _network(found, name, *shape, rules.activation) for name, shape in shapes.items()}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"'{file}' holds no policies that can be read: {error}") from error
    return Pair(rules, **made)


def _network(tensors: Mapping[str, Array], name: str, layout: Layout, actions: int, activation: str) -> Network | None:
    layers: Layers = []
    while (key := f"{name}.{len(layers)}") + ".weight" in tensors:
        layers.append((tensors[f"{key}.weight"], tensors[f"{key}.bias"]))
    if not layers:
        return None
    _check(layers, name, layout.size, actions)
    return Network(layers, layout, activation)


def _check(layers: Layers, name: str, inputs: int, actions: int) -> None:
    """Refuse (ValueError) matrices that do not fit together."""
    if len(layers) < 2:
        raise ValueError(f"the {name} policy must have a hidden layer")
    widths = [inputs, *(len(bias) for _, bias in layers)]
    shapes = [weight.shape for weight, _ in layers]
    if shapes != [(out, own) for own, out in pairwise(widths)] or widths[-1] != actions:
        raise ValueError(f"the {name} policy must turn {inputs} numbers into {actions}; its layers are {shapes}")
    if not all(np.isfinite(weight).all() and np.isfinite(bias).all() for weight, bias in layers):
        raise ValueError(f"the {name} policy has weights that are not finite")


# ---- the policy


@dataclass
class LTD(TreePolicy):
    """A beam whose depth and verified nodes are chosen by two networks that were trained for tokens per second."""

    path: str | None = option(None, "folder that `windfall train ltd` made; none: the one that comes with the package")
    k: int | None = option(None, "beam width, and children of a node; none: as trained", low=1)
    depth: int | None = option(None, "maximum draft passes; none: as trained", low=1)
    every: int | None = option(None, "passes between two questions to the depth policy; none: as trained", low=1)
    constant_length: bool | None = option(
        None, "show the depth policy one length for all texts, as the release does; none: as trained"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        trained = load(SHIPPED if self.path is None else Path(self.path))
        own: dict[str, Any] = {
            "max_depth": self.depth,
            "asked_every": self.every,
            "constant_length": self.constant_length,
        }
        given = {name: value for name, value in own.items() if value is not None}
        self.pair = dataclasses.replace(trained, rules=dataclasses.replace(trained.rules, **given))
        self.width = self.k or trained.rules.k
        self.entropy = "E" in trained.rules.parts

    def plan(self) -> Plan:
        pair, rules, width = self.pair, self.pair.rules, self.width
        passes = rules.max_depth if pair.depth else min(rules.fixed_depth, rules.max_depth)
        plain = Plan(passes=passes, width=width, k=width, rows=self._max_rows)
        if pair.depth is None and pair.size is None:
            return plain
        asked = {level for level in range(1, passes) if pair.depth and rules.asks(level)} | {passes}
        sizes = rules.sizes if pair.size else (rules.fixed_size,)
        return dataclasses.replace(
            plain,
            watches=("score", "length", *(("entropy",) if self.entropy else ())),
            decide=self.decide,
            asks=asked,
            sizes={min(1 + size, self._drafted(level)) for size in sizes for level in asked},
        )

    @property
    def _max_rows(self) -> int:
        rules = self.pair.rules
        return 1 + (rules.sizes[-1] if self.pair.size else rules.fixed_size)

    def _drafted(self, level: int) -> int:
        """Nodes of the tree after this many passes, the root counted."""
        return 1 + self.width * (1 + self.width * (level - 1))

    def decide(self, level: int, view: TreeView, ctx: Context) -> Decision:
        """Ask the depth network whether to stop, and if so the size network how many nodes to verify."""
        entropies = [view.entropies(each) for each in range(1, level + 1)] if self.entropy else [NOTHING]
        newest = View(view.scores(level), view.length, level, entropies[-1])
        last = level >= min(self.pair.rules.max_depth, ctx.room - 1)
        if not last and not self.pair.stops(newest):
            return Decision(True, self._max_rows)
        whole = View(view.all_scores(level), view.length, level, np.concatenate(entropies))
        return Decision(False, min(1 + self.pair.nodes(whole), self._drafted(level)))
