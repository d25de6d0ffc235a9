"""Cycles recorded with the real engine → a trained classifier for `disco`, `specdecpp` or `c2t`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from windfall.core.errors import InputError
from windfall.core.files import replace_file
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, Step
from windfall.policies.beam import Beam
from windfall.policies.context import Context
from windfall.policies.papers import classifiers
from windfall.policies.papers.classifiers import KINDS, Classifier, Floats
from windfall.train.classifier_recipe import Fitting, Recording

if TYPE_CHECKING:
    from windfall.engine.engine import Engine

Progress = Callable[[float], None]
Figures = dict[str, Any]
Nodes = dict[str, list[NDArray[Any]]]  # by what is told of a node, by cycle

CYCLES = "cycles.npz"
SAVE_SECONDS = 20.0  # between two writings of what was recorded
PER_NODE: dict[str, Any] = {
    "parents": np.int32,
    "depth": np.int32,
    "logq": np.float32,
    "score": np.float32,
    "entropy": np.float32,
    "verified": np.bool_,
    "accepted": np.bool_,
}


# ---- recording


@dataclass
class Watched(Beam):
    """A beam that asks for entropies too."""

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        wish = super().grow(tree, ctx)
        return None if wish is None else wish._replace(entropy=True)


class Cycle(NamedTuple):
    """A drafted tree, and what became of its nodes."""

    prompt: int
    tree: DraftTree
    verified: Tensor  # [N] bool
    accepted: Tensor  # [N] bool

    @classmethod
    def of(cls, prompt: int, step: Step) -> Cycle:
        verified, accepted = (torch.zeros(len(step.drafted), dtype=torch.bool) for _ in range(2))
        verified[step.kept] = True
        accepted[step.kept[step.path]] = True
        return cls(prompt, step.drafted, verified, accepted)

    @property
    def reached(self) -> int:
        """The depth of the last accepted node."""
        return int(self.accepted.sum()) - 1


@dataclass
class Cycles:
    """Recorded cycles and where they come from, kept in a file."""

    about: dict[str, Any]
    prompts: int = 0  # finished
    cycles: list[Cycle] = field(default_factory=list)

    @classmethod
    def open(cls, file: Path, about: dict[str, Any], resume: bool) -> Cycles:
        """What was recorded before; a recording of something else is refused."""
        wanted: dict[str, Any] = json.loads(json.dumps(about))
        if not file.is_file():
            return cls(wanted)
        if not resume:
            raise InputError(f"'{file}' holds recorded cycles; use them with --resume, or choose another --out")
        found = cls.read(file)
        if found.about != wanted:
            other = ", ".join(key for key in wanted if found.about.get(key) != wanted[key]) or "settings"
            raise InputError(f"'{file}' holds cycles with another {other}; choose another --out, or remove it")
        return found

    @classmethod
    def read(cls, file: Path) -> Cycles:
        try:
            with np.load(file, allow_pickle=False) as kept:
                about, done = json.loads(str(kept["about"])), int(kept["prompts"])
                ends = np.cumsum(kept["sizes"])[:-1]
                nodes = {name: np.split(kept[name], ends) for name in PER_NODE}
                prompts = kept["prompt"].tolist()
        except Exception as error:  # numpy and zipfile have many
            raise InputError(f"'{file}' is damaged; remove it, and record anew") from error
        return cls(about, done, [_cycle(prompt, nodes, place) for place, prompt in enumerate(prompts)])

    def write(self, file: Path) -> None:
        rows = [_arrays(cycle) for cycle in self.cycles]
        nodes = {
            name: np.concatenate([row[name] for row in rows]).astype(kind) if rows else np.zeros(0, kind)
            for name, kind in PER_NODE.items()
        }
        own = {
            "sizes": np.array([len(cycle.tree) for cycle in self.cycles], dtype=np.int64),
            "prompt": np.array([cycle.prompt for cycle in self.cycles], dtype=np.int64),
            "prompts": np.array(self.prompts),
            "about": np.array(json.dumps(self.about)),
        }

        def fill(temporary: Path) -> None:
            with temporary.open("wb") as stream:
                np.savez_compressed(stream, allow_pickle=False, **own, **nodes)

        replace_file(file, fill)


def _arrays(cycle: Cycle) -> dict[str, NDArray[Any]]:
    tree = cycle.tree
    found = {name: getattr(tree, name) for name in ("parents", "depth", "logq", "score", "entropy")}
    found |= {"verified": cycle.verified, "accepted": cycle.accepted}
    return {name: array.numpy() for name, array in found.items()}


def _cycle(prompt: int, nodes: Nodes, place: int) -> Cycle:
    own = {name: torch.from_numpy(arrays[place]) for name, arrays in nodes.items()}
    unknown = torch.zeros(len(own["depth"]), dtype=torch.long)  # tokens and ranks: nobody asks for them
    parents, depth = own["parents"].long(), own["depth"].long()
    tree = DraftTree(unknown, parents, own["logq"], own["score"], depth, unknown, own["entropy"])
    return Cycle(prompt, tree, own["verified"], own["accepted"])


def record(
    engine: Engine, prompts: list[list[int]], how: Recording, seed: int, cycles: Cycles, file: Path, tell: Progress
) -> None:
    """Answer the prompts (token ids) that are left with a beam, and keep its cycles, whatever happens."""
    engine.policy = Watched(how.depth, how.k, how.nodes)
    saved = time.monotonic()
    try:
        for place in range(cycles.prompts, len(prompts)):
            steps = engine.generate(prompts[place], **how.sampling(seed)).steps
            cycles.cycles += [Cycle.of(place, step) for step in steps if len(step.drafted) > 1]
            cycles.prompts = place + 1
            tell(cycles.prompts / len(prompts))
            if time.monotonic() - saved > SAVE_SECONDS:
                cycles.write(file)
                saved = time.monotonic()
    finally:
        cycles.write(file)


# ---- samples


class Samples(NamedTuple):
    """What a classifier is shown, and whether it came true."""

    inputs: Floats  # [n, I]
    labels: NDArray[np.bool_]  # [n]

    @property
    def counts(self) -> dict[str, int]:
        return {"accepted": int(self.labels.sum()), "rejected": int((~self.labels).sum())}

    def pick(self, places: NDArray[np.int64]) -> Samples:
        return Samples(self.inputs[places], self.labels[places])


def samples_of(kind: str, cycles: list[Cycle], entropy: bool = False) -> Samples:
    """What cycles teach a classifier of this kind."""
    ask = {"disco": _disco, "specdecpp": _specdecpp}
    width = len(classifiers.inputs_of(kind, entropy))
    inputs, labels = [np.zeros((0, width), np.float32)], [np.zeros(0, np.bool_)]
    for cycle in cycles:
        if kind == "c2t":
            nodes = torch.nonzero(cycle.verified).flatten()[1:]  # without the root
            inputs.append(classifiers.c2t_inputs(cycle.tree, nodes, entropy))
            labels.append(cycle.accepted[nodes].numpy())
            continue
        for shown, came in ask[kind](cycle):
            inputs.append(shown[None])
            labels.append(np.array([came]))
    return Samples(np.concatenate(inputs), np.concatenate(labels))


def _disco(cycle: Cycle) -> Iterator[tuple[Floats, bool]]:
    for level in range(1, int(cycle.tree.depth[-1]) + 1):
        yield classifiers.disco_inputs(classifiers.BeamView(cycle.tree), level), cycle.reached >= level


def _specdecpp(cycle: Cycle) -> Iterator[tuple[Floats, bool]]:
    """As far as the accepted path went, and the level that it did not reach."""
    for level in range(1, min(cycle.reached + 1, int(cycle.tree.depth[-1])) + 1):
        yield classifiers.specdecpp_inputs(classifiers.BeamView(cycle.tree), level), cycle.reached >= level


def split(cycles: list[Cycle], held_out: float, seed: int) -> tuple[list[Cycle], list[Cycle]]:
    """Cycles to learn from, and those of other prompts to judge by (with a single prompt: other cycles)."""
    several = len({cycle.prompt for cycle in cycles}) > 1
    groups = [cycle.prompt if several else place for place, cycle in enumerate(cycles)]
    order = sorted(set(groups))
    np.random.default_rng(seed).shuffle(order)
    held = set(order[: max(round(held_out * len(order)), 1)])
    kept = [(cycle, group in held) for cycle, group in zip(cycles, groups, strict=True)]
    return [cycle for cycle, out in kept if not out], [cycle for cycle, out in kept if out]


def balanced(samples: Samples, seed: int) -> Samples:
    """As many accepted as rejected samples, chosen at random."""
    chance = np.random.default_rng(seed)
    sides = [np.flatnonzero(samples.labels == side) for side in (True, False)]
    count = min(map(len, sides))
    return samples.pick(np.sort(np.concatenate([chance.permutation(side)[:count] for side in sides])))


# ---- fitting


class Network(nn.Module):
    """The classifier while it learns, on inputs brought to mean 0 and deviation 1."""

    def __init__(self, kind: str, width: int, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.hidden, self.output = nn.Linear(width, hidden), nn.Linear(hidden, 1)
        self.skip = nn.Linear(width, 1, bias=False) if KINDS[kind].skip else None

    def forward(self, inputs: Tensor) -> Tensor:  # [n, I] -> [n]
        bend = nn.functional.silu if KINDS[self.kind].bend is classifiers.silu else nn.functional.relu
        score: Tensor = self.output(bend(self.hidden(inputs)))
        return (score if self.skip is None else score + self.skip(inputs))[:, 0]

    @torch.no_grad()
    def finish(self, inputs: tuple[str, ...], mean: Tensor, deviation: Tensor, odds: float) -> Classifier:
        """The same on inputs as they are; `odds` is the logarithm of what balancing took out."""
        hidden, bias = self.hidden.weight / deviation, self.output.bias + odds
        weights = {
            "hidden": hidden,
            "hidden_bias": self.hidden.bias - hidden @ mean,
            "output": self.output.weight[0],
            "output_bias": bias,
        }
        if self.skip is not None:
            weights["skip"] = self.skip.weight[0] / deviation
            weights["output_bias"] = bias - weights["skip"] @ mean
        return Classifier(self.kind, inputs, {name: each.numpy().copy() for name, each in weights.items()})


def fit(kind: str, cycles: list[Cycle], how: Fitting, tell: Progress) -> tuple[Classifier, Figures]:
    """A classifier fitted to most of the cycles, and how well it judges the others."""
    known, inputs = classifiers.kind_named(kind), classifiers.inputs_of(kind, how.entropy)
    learning, judging = (samples_of(kind, part, how.entropy) for part in split(cycles, how.held_out, how.seed))
    for samples, where in ((learning, "to learn from"), (judging, "held out")):
        if not all(samples.counts.values()):
            told = " and ".join(f"{count} {name}" for name, count in samples.counts.items())
            raise InputError(f"the cycles {where} have {told}, and both are needed; record more prompts")
    odds = math.log(learning.labels.sum() / (~learning.labels).sum())
    learning = learning if how.unbalanced else balanced(learning, how.seed)
    torch.manual_seed(how.seed)
    network = Network(kind, len(inputs), how.hidden or known.hidden)
    shown = torch.from_numpy(learning.inputs)
    mean, deviation = shown.mean(0), shown.std(0, correction=0).clamp(min=1e-6)
    _learn(network, (shown - mean) / deviation, torch.from_numpy(learning.labels), how, tell)
    restored = odds if known.frequencies and not how.unbalanced else 0.0
    made = network.finish(inputs, mean, deviation, restored)
    return made, {"samples": learning.counts, **judge(made, judging, restored)}


def _learn(network: Network, inputs: Tensor, labels: Tensor, how: Fitting, tell: Progress) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=how.rate, weight_decay=how.decay)
    weights = torch.where(labels, 1.0, how.mismatch)
    epochs, order = how.epochs or KINDS[network.kind].epochs, torch.Generator().manual_seed(how.seed)
    for epoch in range(epochs):
        for places in torch.split(torch.randperm(len(labels), generator=order), how.batch):
            loss = nn.functional.binary_cross_entropy_with_logits(
                network(inputs[places]), labels[places].float(), weights[places]
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        tell((epoch + 1) / epochs)


def judge(classifier: Classifier, samples: Samples, odds: float = 0.0) -> Figures:
    """Accuracy at even odds (before they were restored), both classes counted alike, and the area under the ROC curve,
    on samples not learnt from."""
    chances, came, even = classifier(samples.inputs), samples.labels, 1 / (1 + math.exp(-odds))
    accuracy = ((chances[came] >= even).mean() + (chances[~came] < even).mean()) / 2
    return {"held_out": samples.counts, "accuracy": float(accuracy), "auc": area(chances, came)}


def area(chances: Floats, came: NDArray[np.bool_]) -> float:
    """How often an accepted sample gets more than a rejected one; ties count half."""
    _, places, counts = np.unique(chances, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]  # the mean rank of equal values
    yes, no = int(came.sum()), int((~came).sum())
    return float((ranks[came].sum() - yes * (yes + 1) / 2) / (yes * no))


def card(how: Fitting, cycles: Cycles, figures: Figures, command: str) -> dict[str, Any]:
    """What a classifier's JSON tells about it."""
    tokens = np.array([cycle.reached + 1 for cycle in cycles.cycles])
    told = {"cycles": len(tokens), "tokens_per_cycle": {"mean": float(tokens.mean()), "deviation": float(tokens.std())}}
    return {**figures, "fitting": vars(how), "data": {**cycles.about, **told}, "command": command}
