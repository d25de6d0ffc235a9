"""Fixed tree shapes: sets of rank paths."""

from __future__ import annotations

from collections.abc import Iterable

from windfall.core.errors import InputError
from windfall.core.tree import DraftTree

Path = tuple[int, ...]  # ranks from the root: (0, 2) is the third-best child of the best child


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

    def numbered(self) -> dict[tuple[int, int], int]:
        """(number of a node, rank) → number of its child. Numbers ascend level by level, inner nodes first."""
        inner = {place for level in self.levels for place in level}
        order = sorted(range(len(self)), key=lambda place: (len(self.paths[place]), place not in inner, place))
        number = {place: i for i, place in enumerate(order)}
        return {(number[parent], rank): number[child] for (parent, rank), child in self.child.items()}
