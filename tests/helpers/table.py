"""A table model: next-token distributions looked up from the last token, so that trees can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from windfall.core.tree import DraftTree
from windfall.core.types import Grow
from windfall.costs.acceptance import Calibrator
from windfall.costs.curves import ASSUMED, Costs
from windfall.drafters.base import add_children
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context


class TableDrafter:
    """Drafts from q(next | last) = table[last]; table [V, V]. No engine, no model, microseconds."""

    def __init__(self, table: Tensor | Sequence[Sequence[float]]):
        self.logq = torch.as_tensor(table, dtype=torch.float32).log()

    def expand(self, tree: DraftTree, grow: Grow) -> DraftTree:
        return add_children(tree, grow, self.logq[tree.tokens[grow.nodes]], None)


def random_table(vocabulary: int, seed: int, sharpness: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(sharpness * torch.randn(vocabulary, vocabulary, generator=generator), -1)


def draft(
    policy: TreePolicy,
    drafter: TableDrafter,
    root: int = 0,
    room: int = 64,
    costs: Costs = ASSUMED,
    calibrator: Calibrator | None = None,
) -> tuple[DraftTree, Tensor, int]:
    """One cycle of drafting as the engine does it: the grown tree, what is kept of it, and the passes it took."""
    from windfall.engine.host_loop import Growth

    context = Context(length=10, room=room, temperature=0.0, costs=costs, calibrator=calibrator or Calibrator())
    tree, growth = DraftTree.root(root), Growth(policy, context)
    while (grow := growth.next(tree)) is not None:
        tree = drafter.expand(tree, grow)
    return tree, policy.select(tree, context), growth.passes
