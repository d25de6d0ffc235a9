"""Trees with a fixed shape: computing a shape from accuracies, parsing it, and drafting it."""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windfall.core.files import parse_json
from windfall.core.types import InputError
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context
from windfall.policies.plan import Opening, Plan
from windfall.policies.shape import Path, Shape

MAX_INNER_NODES = 16  # of a level: the nodes that a draft pass expands
Table = tuple[tuple[float, ...], ...]  # [depth][rank]: the share of cases in which the child of this rank is correct
EXAMPLE = "0.6,0.14,0.07,0.04,0.03,0.02,0.015,0.01"  # an acceptance vector to start from; measure your own
NEVER = -1e9  # the value of a tree that cannot be built


class StaticTreePolicy(TreePolicy):
    """Drafts a shape level by level: one pass for each level, as many children for all as the widest node needs."""

    def layout(self, ctx: Context) -> Shape:
        """The tree of this cycle."""
        raise NotImplementedError

    @property
    def most(self) -> tuple[int, int, int]:
        """Passes, children of a node and rows that a layout may have."""
        raise NotImplementedError

    def plan(self) -> Plan:
        passes, k, rows = self.most
        return Plan(
            passes=passes,
            width=MAX_INNER_NODES,
            k=k,
            rows=rows,
            shape=self.layout,
            opening=self._opening,
            openings=range(1, passes + 1),
        )

    def _opening(self, ctx: Context) -> Opening:
        shape = self.layout(ctx)
        return Opening(len(shape.levels), len(shape))


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


class BestTrees:
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
    """`"0.6,0.2"`: the share of cases in which the child of each rank is correct; they may sum to less than 1."""
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
