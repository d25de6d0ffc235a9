"""Recordings for LTD training: at every position of a text, the widest beam and the text's path through it.

The target generates each text plainly, one token per cycle. At every position the drafter grows the whole beam, and
only the root is verified. What is drafted depends on the tokens only, so any policy would meet the recorded tree at
that position, and a beam of any depth and size is a part of it. A replay therefore moves from position to position
exactly as the engine would. (At temperatures above 0, a drafter that sees the noise also depends on the calibrator,
which changes over time; a replay is then approximate.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from windfall.core.errors import InputError
from windfall.core.files import replace_arrays
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, Step
from windfall.policies.beam import Beam
from windfall.policies.context import Context

if TYPE_CHECKING:
    from windfall.engine.engine import Engine

Array = np.ndarray[Any, Any]
FORMAT = 1
ARRAYS = ("tokens", "parents", "logq", "entropy", "sizes", "lengths", "rooms", "texts", "path", "steps")
REQUIRED_METADATA = ("depth", "k", "target", "sampling", "ids")
DTYPES = dict(zip(ARRAYS, ("i4", "i2", "f4", "f4", "i4", "i4", "i4", "i4", "i2", "i2"), strict=True))


@dataclass
class Tree:
    """The tree at one position of one text."""

    text: int
    length: int  # committed tokens, including the root
    room: int  # tokens that could still be generated
    left: int  # tokens that were generated from here on
    parents: Array  # [N]
    score: Array  # [N] fp32, cumulative
    depth: Array  # [N]
    entropy: Array  # [N] fp32, NaN where the node was not expanded
    path: Array  # [a] the nodes of the text's own tokens, from depth 1 on


@dataclass
class Recording:
    """The trees of whole texts in flat arrays; `sizes` are the nodes of each tree, `steps` the lengths of the paths."""

    about: dict[str, Any]
    arrays: dict[str, Array] = field(default_factory=dict)

    @property
    def ids(self) -> list[str]:
        """The ids of the prompts, one for each text."""
        return list(self.about["ids"])

    def trees(self) -> Iterator[Tree]:
        """The trees of each text, in the order of positions."""
        found, node, step = self.arrays, 0, 0
        ends = _positions_left(found["texts"])
        for place, (size, steps) in enumerate(zip(found["sizes"].tolist(), found["steps"].tolist(), strict=True)):
            own = slice(node, node + size)
            parents = found["parents"][own].astype(np.int64)
            score, depth = _accumulate(parents, found["logq"][own])
            yield Tree(
                int(found["texts"][place]),
                int(found["lengths"][place]),
                int(found["rooms"][place]),
                int(ends[place]),
                parents,
                score,
                depth,
                found["entropy"][own],
                found["path"][step : step + steps].astype(np.int64),
            )
            node, step = node + size, step + steps

    def save(self, file: Path) -> None:
        replace_arrays(file, {**self.arrays, "about": np.array(json.dumps(self.about))})

    @classmethod
    def load(cls, file: Path) -> Recording:
        try:
            with np.load(file, allow_pickle=False) as found:
                about = json.loads(str(found["about"]))
                made = int(about["format"])
                arrays = {name: found[name].astype(DTYPES[name]) for name in ARRAYS}
            if made == FORMAT and not _fits(about, arrays):
                raise ValueError("inconsistent arrays")
        except OSError as error:
            raise InputError(f"cannot read '{file}': {error.strerror or error}") from error
        except Exception as error:  # numpy, zipfile and zlib raise many kinds
            raise InputError(f"'{file}' is no recording; make one with: windfall train record") from error
        if made != FORMAT:
            raise InputError(f"'{file}' was made by another version; make it again with: windfall train record")
        return cls(about, arrays)

    def check(self, wanted: Mapping[str, Any], file: Path) -> None:
        """Refuse a recording with other settings than wanted."""
        if other := [name for name, value in wanted.items() if self.about.get(name) != value]:
            raise InputError(f"'{file}' was recorded with another {', '.join(other)}; give another, or remove it")

    def joined(self, other: Recording) -> Recording:
        """Both recordings in one."""
        arrays = {name: np.concatenate([self.arrays[name], other.arrays[name]]) for name in ARRAYS}
        arrays["texts"][len(self.arrays["texts"]) :] += len(self.ids)
        return Recording({**self.about, "ids": [*self.ids, *other.ids]}, arrays)


def _fits(about: Mapping[str, Any], arrays: Mapping[str, Array]) -> bool:
    """Whether the metadata is complete and the arrays have consistent sizes."""
    counts = {name: len(array) for name, array in arrays.items()}
    nodes, places = ("tokens", "parents", "logq", "entropy"), ("sizes", "lengths", "rooms", "texts", "steps")
    return (
        set(REQUIRED_METADATA) <= set(about)
        and all(counts[name] == arrays["sizes"].sum() for name in nodes)
        and all(counts[name] == counts["sizes"] for name in places)
        and counts["path"] == arrays["steps"].sum()
        and set(arrays["texts"].tolist()) <= set(range(len(about["ids"])))
    )


def _positions_left(texts: Array) -> Array:
    """For each position, the number of positions of its text from here on, including itself."""
    counts = np.bincount(texts) if len(texts) else np.zeros(0, dtype=np.int64)
    starts = np.cumsum(counts) - counts
    return (counts + starts)[texts] - np.arange(len(texts))


def _accumulate(parents: Array, logq: Array) -> tuple[Array, Array]:
    """Path scores and depths, added up level by level exactly as DraftTree does."""
    score, depth = np.zeros(len(parents), dtype=np.float32), np.zeros(len(parents), dtype=np.int64)
    start = 1
    while start < len(parents):
        end = start + int(np.searchsorted(parents[start:], start))  # nodes whose parents are in earlier levels
        own = parents[start:end]
        score[start:end], depth[start:end] = score[own] + logq[start:end], depth[own] + 1
        start = end
    return score, depth


# ---- recording


@dataclass
class UnverifiedBeam(Beam):
    """A beam with entropies of which only the root is verified, so that each cycle generates one token."""

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        grow = super().grow(tree, ctx)
        return grow and grow._replace(entropy=True)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        return torch.zeros(1, dtype=torch.long)


def record(
    engine: Engine,
    prompts: Sequence[tuple[str, Any]],
    progress: Callable[[float], None] = lambda share: None,
    *,
    depth: int = 12,
    k: int = 10,
    drafter: str = "",
    **sampling: Any,
) -> Iterator[Recording]:
    """Decode the prompts (pairs of id and prompt) and yield the recording of each finished text.

    `drafter` is the drafter's name in the recording.
    """
    policy, engine.policy = engine.policy, UnverifiedBeam(depth=depth, k=k)
    about = describe(engine, drafter, depth, k, sampling)
    total = sampling.get("max_new_tokens", 256) * len(prompts)
    try:
        for done, (name, prompt) in enumerate(prompts):
            length, steps = len(engine.encode(prompt)), list[Step]()
            for step in engine.stream(prompt, **{"seed": 0, **sampling}):  # as `Live` does
                steps.append(step)
                progress(done / len(prompts) + len(steps) / total)
            yield Recording({**about, "ids": [name]}, _arrays(engine, steps, length, sampling))
    finally:
        engine.policy = policy


def describe(engine: Engine, drafter: str, depth: int, k: int, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a recording: what it depends on, besides its prompts."""
    plain = {key: value for key, value in sampling.items() if isinstance(value, int | float | str)}
    own = {"depth": depth, "k": k, "target": engine.target.name, "drafter": drafter, "sampling": plain}
    return {"format": FORMAT, **own}


def _arrays(engine: Engine, steps: Sequence[Step], length: int, sampling: dict[str, Any]) -> dict[str, Array]:
    text, context = [step.tokens[0] for step in steps], engine.target.context
    limit = sampling.get("max_new_tokens", 256)
    end = limit if context is None else min(limit, context - length)
    trees, places = [step.drafted for step in steps], np.arange(len(steps))
    paths = [_path(tree, text[place:]) for place, tree in enumerate(trees)]
    found: dict[str, Any] = {
        "tokens": torch.cat([tree.tokens for tree in trees]).numpy(),
        "parents": torch.cat([tree.parents for tree in trees]).numpy(),
        "logq": torch.cat([tree.logq for tree in trees]).numpy(),
        "entropy": torch.cat([tree.entropy for tree in trees]).numpy(),
        "sizes": [len(tree) for tree in trees],
        "lengths": length + places,
        "rooms": end - places,
        "texts": np.zeros(len(trees)),
        "path": [node for path in paths for node in path],
        "steps": [len(path) for path in paths],
    }
    return {name: np.asarray(found[name], dtype=DTYPES[name]) for name in ARRAYS}


def _path(tree: DraftTree, text: Sequence[int]) -> list[int]:
    """The nodes that follow the text, from depth 1 to where the text leaves the tree."""
    edges = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    child = {edge: node for node, edge in enumerate(edges)}
    path, node = list[int](), 0
    for token in text:
        if (node := child.get((node, token), -1)) < 0:
            break
        path.append(node)
    return path
