"""Record cycles of the real engine and fit the classifier of `disco`, `specdecpp` or `c2t` to them."""

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
from windfall.core.files import replace_arrays
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, Step
from windfall.policies.beam import Beam
from windfall.policies.context import Context
from windfall.policies.papers import classifiers
from windfall.policies.papers.classifiers import KINDS, Classifier, Floats
from windfall.train.classifiers.options import Fitting, Recording

if TYPE_CHECKING:
    from windfall.engine.engine import Engine

Progress = Callable[[float], None]  # called with the finished share
Figures = dict[str, Any]

CYCLES_FILE = "cycles.npz"
SAVE_SECONDS = 20.0  # between saves while recording
NODE_ARRAYS: dict[str, Any] = {
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
class BeamWithEntropy(Beam):
    """A beam that also measures the drafter's entropies."""

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        grow = super().grow(tree, ctx)
        return None if grow is None else grow._replace(entropy=True)


class Cycle(NamedTuple):
    """A drafted tree, and which of its nodes were verified and accepted."""

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
    def accepted_depth(self) -> int:
        """The depth of the last accepted node."""
        return int(self.accepted.sum()) - 1


@dataclass
class Cycles:
    """Recorded cycles and what they depend on, as stored in a file."""

    about: dict[str, Any]
    prompts: int = 0  # finished
    cycles: list[Cycle] = field(default_factory=list)

    @classmethod
    def open(cls, file: Path, about: dict[str, Any], resume: bool) -> Cycles:
        """The cycles in the file, or none; a recording with other settings is refused."""
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
            with np.load(file, allow_pickle=False) as stored:
                about, done = json.loads(str(stored["about"])), int(stored["prompts"])
                ends = np.cumsum(stored["sizes"])[:-1]
                nodes = {name: np.split(stored[name], ends) for name in NODE_ARRAYS}
                prompts = stored["prompt"].tolist()
        except Exception as error:  # numpy and zipfile raise many kinds
            raise InputError(f"'{file}' is damaged; remove it and record again") from error
        each = ({name: torch.from_numpy(arrays[i]) for name, arrays in nodes.items()} for i in range(len(prompts)))
        return cls(about, done, [_read_cycle(*pair) for pair in zip(prompts, each, strict=True)])

    def write(self, file: Path) -> None:
        rows = [_node_arrays(cycle) for cycle in self.cycles]
        nodes = {
            name: np.concatenate([row[name] for row in rows]).astype(kind) if rows else np.zeros(0, kind)
            for name, kind in NODE_ARRAYS.items()
        }
        own = {
            "sizes": np.array([len(cycle.tree) for cycle in self.cycles], dtype=np.int64),
            "prompt": np.array([cycle.prompt for cycle in self.cycles], dtype=np.int64),
            "prompts": np.array(self.prompts),
            "about": np.array(json.dumps(self.about)),
        }
        replace_arrays(file, {**own, **nodes})


def _node_arrays(cycle: Cycle) -> dict[str, NDArray[Any]]:
    tree = cycle.tree
    found = {name: getattr(tree, name) for name in ("parents", "depth", "logq", "score", "entropy")}
    found |= {"verified": cycle.verified, "accepted": cycle.accepted}
    return {name: array.numpy() for name, array in found.items()}


def _read_cycle(prompt: int, own: dict[str, Tensor]) -> Cycle:
    unused = torch.zeros(len(own["depth"]), dtype=torch.long)  # tokens and ranks are not stored
    parents, depth = own["parents"].long(), own["depth"].long()
    tree = DraftTree(unused, parents, own["logq"], own["score"], depth, unused, own["entropy"])
    return Cycle(prompt, tree, own["verified"], own["accepted"])


def record(
    engine: Engine, prompts: list[list[int]], how: Recording, seed: int, cycles: Cycles, file: Path, progress: Progress
) -> None:
    """Answer the remaining prompts (token ids) with a beam and store its cycles, also when interrupted."""
    policy, engine.policy = engine.policy, BeamWithEntropy(how.depth, how.k, how.nodes)
    saved = time.monotonic()
    try:
        for number in range(cycles.prompts, len(prompts)):
            steps = engine.generate(prompts[number], **how.sampling(seed)).steps
            cycles.cycles += [Cycle.of(number, step) for step in steps if len(step.drafted) > 1]
            cycles.prompts = number + 1
            progress(cycles.prompts / len(prompts))
            if time.monotonic() - saved > SAVE_SECONDS:
                cycles.write(file)
                saved = time.monotonic()
    finally:
        engine.policy = policy
        cycles.write(file)


# ---- samples


class Samples(NamedTuple):
    """Inputs of a classifier and whether the token was accepted."""

    inputs: Floats  # [n, I]
    labels: NDArray[np.bool_]  # [n]

    @property
    def counts(self) -> dict[str, int]:
        return {"accepted": int(self.labels.sum()), "rejected": int((~self.labels).sum())}

    def pick(self, indices: NDArray[np.int64]) -> Samples:
        return Samples(self.inputs[indices], self.labels[indices])


def samples_of(kind: str, cycles: list[Cycle], entropy: bool = False) -> Samples:
    """The samples of these cycles for a classifier of this kind."""
    levels = {"disco": _disco, "specdecpp": _specdecpp}
    width = len(classifiers.inputs_of(kind, entropy))
    inputs, labels = [np.zeros((0, width), np.float32)], [np.zeros(0, np.bool_)]
    for cycle in cycles:
        if kind == "c2t":
            nodes = torch.nonzero(cycle.verified).flatten()[1:]  # without the root
            inputs.append(classifiers.c2t_inputs(cycle.tree, nodes, entropy))
            labels.append(cycle.accepted[nodes].numpy())
            continue
        for values, accepted in levels[kind](cycle):
            inputs.append(values[None])
            labels.append(np.array([accepted]))
    return Samples(np.concatenate(inputs), np.concatenate(labels))


def _disco(cycle: Cycle) -> Iterator[tuple[Floats, bool]]:
    for level in range(1, int(cycle.tree.depth[-1]) + 1):
        yield classifiers.disco_inputs(classifiers.BeamView(cycle.tree), level), cycle.accepted_depth >= level


def _specdecpp(cycle: Cycle) -> Iterator[tuple[Floats, bool]]:
    """The accepted levels, and the first level that was not accepted."""
    for level in range(1, min(cycle.accepted_depth + 1, int(cycle.tree.depth[-1])) + 1):
        yield classifiers.specdecpp_inputs(classifiers.BeamView(cycle.tree), level), cycle.accepted_depth >= level


def split(cycles: list[Cycle], held_out: float, seed: int) -> tuple[list[Cycle], list[Cycle]]:
    """Training cycles and validation cycles, of different prompts; with a single prompt, different cycles."""
    several = len({cycle.prompt for cycle in cycles}) > 1
    groups = [cycle.prompt if several else number for number, cycle in enumerate(cycles)]
    order = sorted(set(groups))
    np.random.default_rng(seed).shuffle(order)
    held = set(order[: max(round(held_out * len(order)), 1)])
    pairs = list(zip(cycles, groups, strict=True))
    return [cycle for cycle, group in pairs if group not in held], [cycle for cycle, group in pairs if group in held]


def balanced(samples: Samples, seed: int) -> Samples:
    """Equally many accepted and rejected samples, chosen at random."""
    random = np.random.default_rng(seed)
    classes = [np.flatnonzero(samples.labels == label) for label in (True, False)]
    count = min(map(len, classes))
    return samples.pick(np.sort(np.concatenate([random.permutation(own)[:count] for own in classes])))


# ---- fitting


class Network(nn.Module):
    """The classifier in training; its inputs are normalised to mean 0 and deviation 1."""

    def __init__(self, kind: str, width: int, hidden: int) -> None:
        super().__init__()
        self.kind = kind
        self.hidden, self.output = nn.Linear(width, hidden), nn.Linear(hidden, 1)
        self.skip = nn.Linear(width, 1, bias=False) if KINDS[kind].skip else None

    def forward(self, inputs: Tensor) -> Tensor:  # [n, I] -> [n]
        activation = nn.functional.silu if KINDS[self.kind].bend is classifiers.silu else nn.functional.relu
        score: Tensor = self.output(activation(self.hidden(inputs)))
        return (score if self.skip is None else score + self.skip(inputs))[:, 0]

    @torch.no_grad()
    def finish(self, inputs: tuple[str, ...], mean: Tensor, deviation: Tensor, odds: float) -> Classifier:
        """The classifier for inputs that are not normalised; `odds` are the log-odds that balancing removed."""
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


def fit(kind: str, cycles: list[Cycle], how: Fitting, progress: Progress) -> tuple[Classifier, Figures]:
    """A classifier fitted to the training cycles, and its figures on the validation cycles."""
    known, inputs = classifiers.kind_named(kind), classifiers.inputs_of(kind, how.entropy)
    training, held_out = (samples_of(kind, part, how.entropy) for part in split(cycles, how.held_out, how.seed))
    for samples, name in ((training, "training"), (held_out, "held-out")):
        if not all(samples.counts.values()):
            counts = " and ".join(f"{count} {label}" for label, count in samples.counts.items())
            raise InputError(f"the {name} cycles have {counts} samples, and both are needed; record more prompts")
    odds = math.log(training.labels.sum() / (~training.labels).sum())
    training = training if how.unbalanced else balanced(training, how.seed)
    torch.manual_seed(how.seed)
    network = Network(kind, len(inputs), how.hidden or known.hidden)
    values = torch.from_numpy(training.inputs)
    mean, deviation = values.mean(0), values.std(0, correction=0).clamp(min=1e-6)
    _optimize(network, (values - mean) / deviation, torch.from_numpy(training.labels), how, progress)
    restored = odds if known.frequencies and not how.unbalanced else 0.0
    made = network.finish(inputs, mean, deviation, restored)
    return made, {"samples": training.counts, **evaluate(made, held_out, restored)}


def _optimize(network: Network, inputs: Tensor, labels: Tensor, how: Fitting, progress: Progress) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=how.rate, weight_decay=how.decay)
    weights = torch.where(labels, 1.0, how.mismatch)
    epochs, random = how.epochs or KINDS[network.kind].epochs, torch.Generator().manual_seed(how.seed)
    for epoch in range(epochs):
        for rows in torch.split(torch.randperm(len(labels), generator=random), how.batch):
            loss = nn.functional.binary_cross_entropy_with_logits(
                network(inputs[rows]), labels[rows].float(), weights[rows]
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        progress((epoch + 1) / epochs)


def evaluate(classifier: Classifier, samples: Samples, odds: float = 0.0) -> Figures:
    """Balanced accuracy (at even odds, before `odds` were restored) and the area under the ROC curve."""
    scores, accepted, even = classifier(samples.inputs), samples.labels, 1 / (1 + math.exp(-odds))
    accuracy = ((scores[accepted] >= even).mean() + (scores[~accepted] < even).mean()) / 2
    return {"held_out": samples.counts, "accuracy": float(accuracy), "auc": roc_area(scores, accepted)}


def roc_area(scores: Floats, accepted: NDArray[np.bool_]) -> float:
    """The share of pairs in which the accepted sample has the higher score; ties count half."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]  # the mean rank of equal values
    yes, no = int(accepted.sum()), int((~accepted).sum())
    return float((ranks[accepted].sum() - yes * (yes + 1) / 2) / (yes * no))


def card(how: Fitting, cycles: Cycles, figures: Figures, command: str) -> dict[str, Any]:
    """The content of the classifier's JSON file: figures, settings, data and the command."""
    tokens = np.array([cycle.accepted_depth + 1 for cycle in cycles.cycles])
    data = {"cycles": len(tokens), "tokens_per_cycle": {"mean": float(tokens.mean()), "deviation": float(tokens.std())}}
    return {**figures, "fitting": vars(how), "data": {**cycles.about, **data}, "command": command}
