"""One tree for every cycle: published shapes (EAGLE-1, Li et al. 2024; Medusa, Cai et al. 2024), or one's own."""

from __future__ import annotations

from dataclasses import dataclass

from windfall.core.options import option
from windfall.core.types import InputError
from windfall.policies.context import Context
from windfall.policies.shape import Shape
from windfall.policies.static_trees import StaticTreePolicy, grow_by_product, parse_paths, parse_table

PUBLISHED = {  # children of each inner node, named by its ranks from the root
    # mc_sim_7b_63 of EAGLE's model/choices.py: 25 nodes, 4 8 8 3 2 by depth
    "eagle-1": {"": 4, "0": 3, "1": 2, "2": 2, "3": 1, "00": 3, "01": 2, "02": 2, "10": 1, "000": 3, "0000": 2},
    # mc_sim_7b_63 of Medusa's medusa_choices.py: 63 nodes, 10 28 23 2 by depth
    "medusa": {"": 10, "0": 10, "1": 7, "2": 3, "3": 2, "4": 1, "5": 1, "6": 1, "7": 1, "8": 1, "9": 1}
    | {"00": 10, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1, "10": 2, "20": 1, "000": 2},
}
SHAPES = {
    name: Shape((*map(int, parent), rank) for parent, children in tree.items() for rank in range(children))
    for name, tree in PUBLISHED.items()
}


@dataclass
class Static(StaticTreePolicy):
    """A published shape by name, rank paths, or the best tree for a table of accuracies (Medusa's procedure).

    With `accuracy` the tree grows from the root by the node of the highest product of accuracies on its path.
    """

    shape: str = option("eagle-1", f"{' or '.join(SHAPES)}, or rank paths like [[0],[1],[0,0]]")
    accuracy: str = option(
        "", "instead: the share of correct children by rank, one row for each depth, like [[0.6,0.2],[0.5,0.1]]"
    )
    nodes: int = option(63, "maximum drafted nodes", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._layout = self._build()
        if len(self._layout) > self.nodes + 1:
            raise InputError(f"the tree has {len(self._layout) - 1} nodes; nodes allows {self.nodes}")

    def layout(self, ctx: Context) -> Shape:
        return self._layout

    @property
    def most(self) -> tuple[int, int, int]:
        return self._layout.extent

    def _build(self) -> Shape:
        if self.accuracy:
            return grow_by_product(parse_table(self.accuracy, "accuracy"), self.nodes)
        if self.shape in SHAPES:
            return SHAPES[self.shape]
        return parse_paths(self.shape, f"shape is {' or '.join(SHAPES)}, or else it")
