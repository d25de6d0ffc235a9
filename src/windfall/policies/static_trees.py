"""Trees whose form is known before the text: rank paths, how they grow from accuracies, and how they are drafted."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windfall.core.files import parse_json
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, InputError
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context

Path = tuple[int, ...]  # ranks from the root: (0, 2) is the third-best child of the best child
Table = tuple[tuple[float, ...], ...]  # [depth][rank]: how often the child of this rank is the right one
EXAMPLE = "0.6,0.14,0.07,0.04,0.03,0.02,0.015,0.01"  # an acceptance vector to start from; measure your own
NEVER = -1e9  # the value of a tree that cannot be built


class Shape:
    """A set of rank paths, each with its parent. Places number them level by level; the root's place is 0."""

    def __init__(self, paths: Iterable[Path]):
        self.paths = ((), *sorted(set(paths) - {()}, key=lambda path: (len(path), path)))
        place = {path: i for i, path in enumerate(self.paths)}
        self.child: dict[tuple[int, int], int] = {}  # (place, rank) → place
        self.levels: list[dict[int, int]] = []  # depth → {place of an inner node: children to ask for}
        for path in self.paths[1:]:
            if path[:-1] not in place:
                raise InputError(f"the tree has {list(path)} without its parent {list(path[:-1])}")
            parent = place[path[:-1]]
            self.child[parent, path[-1]] = place[path]
            if len(path) > len(self.levels):
                self.levels.append({})
            self.levels[-1][parent] = path[-1] + 1  # paths ascend, so the last child of a parent has the highest rank

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def extent(self) -> tuple[int, int, int]:
        """Levels below the root, children of a node at the most (those of lower ranks counted), and nodes."""
        return len(self.levels), max((k for level in self.levels for k in level.values()), default=1), len(self)

    def places(self, tree: DraftTree) -> list[int]:
        """The place of every drafted node, -1 where the shape has none."""
        places = [0]
        for parent, rank in zip(tree.arrays.parents[1:].tolist(), tree.arrays.rank[1:].tolist(), strict=True):
            places.append(self.child.get((places[parent], rank), -1))
        return places


class StaticTreePolicy(TreePolicy):
    """Drafts a shape level by level: one pass a level, as many children for all as the widest node wants."""

    def layout(self, ctx: Context) -> Shape:
        """The tree of this cycle."""
        raise NotImplementedError

    @property
    def most(self) -> tuple[int, int, int]:
        """Passes, children of a node and rows that a layout may have."""
        raise NotImplementedError

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        shape, level = self.layout(ctx), int(tree.arrays.depth[-1])
        if level >= len(shape.levels):
            return None
        inner = shape.levels[level]
        found = [(node, inner[place]) for node, place in enumerate(shape.places(tree)) if place in inner]
        return Grow(torch.tensor([node for node, _ in found]), k=max(k for _, k in found)) if found else None

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        return torch.tensor([node for node, place in enumerate(self.layout(ctx).places(tree)) if place >= 0])


def grow_by_product(table: Table, nodes: int, least: float = 0.0) -> Shape:
    """The `nodes` paths of the highest product of accuracies, as far as the product is above `least`.

    A parent comes before its children, because products only fall; equal products go to the shorter path.
    """
    heap: list[tuple[float, int, Path]] = [(-1.0, 0, ())]
    paths: list[Path] = []
    while heap and len(paths) <= nodes:
        value, depth, path = heapq.heappop(heap)
        paths.append(path)
        for rank, accuracy in enumerate(table[depth] if depth < len(table) else ()):
            if -value * accuracy > least:
                heapq.heappush(heap, (value * accuracy, depth + 1, (*path, rank)))
    return Shape(paths)


class Plan:
    """Every optimal tree up to a size and depth: Sequoia's dynamic program over how many nodes each subtree gets."""

    def __init__(self, acceptance: tuple[float, ...], nodes: int, depth: int):
        size = np.arange(nodes + 1)
        rest = size[:, None] - size  # [m, y]: nodes left for the last subtree
        possible = (rest >= 1) & (size >= 1)
        rest = rest.clip(0)
        alone = np.where(size == 1, 1.0, NEVER)
        self.best: list[NDArray[np.float64]] = [alone]  # [depth][m]: tokens a cycle of m rows commits at best
        self.children = [np.zeros(nodes + 1, int)]  # [depth][m]: how many children the root of that tree has
        self.splits: list[list[NDArray[np.int64]]] = [[]]  # [depth][b][m]: rows before the subtree of child b
        for _ in range(depth):
            values, splits = [alone], []
            for chance in acceptance:
                below = np.where(self.best[-1] > 0, chance * self.best[-1], NEVER)
                value = np.where(possible, values[-1] + below[rest], NEVER)  # [m, y]
                splits.append(value.argmax(1))
                values.append(value.max(1))
            self.best.append(np.max(values, 0))
            self.children.append(np.argmax(values, 0))
            self.splits.append(splits)

    def paths(self, rows: int, depth: int, path: Path = ()) -> list[Path]:
        """The best tree of exactly this many rows and at most this depth."""
        found = [path]
        for rank in reversed(range(self.children[depth][rows])):
            before = int(self.splits[depth][rank][rows])
            found += self.paths(rows - before, depth - 1, (*path, rank))
            rows = before
        return found


@lru_cache(maxsize=64)
def parse_vector(text: str, name: str) -> tuple[float, ...]:
    """`"0.6,0.2"`: how often the child of each rank is the right one; what is missing to 1 is "none of them"."""
    try:
        vector = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{name} must be numbers with commas, like 0.6,0.2,0.1, not '{text}'") from None
    if not all(0 <= value <= 1 for value in vector) or sum(vector) > 1 + 1e-6:
        raise InputError(f"{name} must be probabilities that sum to at most 1, not '{text}'")
    return vector


@lru_cache(maxsize=64)
def parse_table(text: str, name: str) -> Table:
    """`"[[0.6,0.2],[0.5,0.1]]"`: one row of accuracies by rank for each depth."""
    rows = _read_json(text, name, "[[0.6,0.2],[0.5,0.1]]")
    if not all(isinstance(value, int | float) and 0 <= value <= 1 for row in rows for value in row):
        raise InputError(f"{name} must hold probabilities between 0 and 1")
    return tuple(tuple(float(value) for value in row) for row in rows)


@lru_cache(maxsize=64)
def parse_paths(text: str, name: str) -> Shape:
    """`"[[0],[1],[0,0]]"`: rank paths."""
    paths = _read_json(text, name, "[[0],[1],[0,0]]")
    if not all(isinstance(rank, int) and rank >= 0 for path in paths for rank in path):
        raise InputError(f"{name} must hold ranks: 0 for the likeliest child, 1 for the next, ...")
    return Shape(tuple(path) for path in paths)


def _read_json(text: str, name: str, example: str) -> list[list[Any]]:
    try:
        rows = parse_json(text)
    except (ValueError, TypeError):
        rows = None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise InputError(f"{name} must be a list of lists like {example}, not '{text}'")
    return rows
