"""The contract of a tree policy: three hooks, called by the engine once a cycle."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from windfall import options
from windfall.context import Context
from windfall.records import Grow, Step
from windfall.tree import DraftTree

P = TypeVar("P", bound="TreePolicy")


@dataclass
class TreePolicy:
    """Decides which nodes to expand and which to verify. It can change the speed and nothing else.

    Subclasses are dataclasses whose fields (made with `option`) are what a user can set; state that lasts over cycles
    is set up in `__post_init__`. One object serves one sequence.
    """

    uses_costs: ClassVar[bool] = False  # whether it wants this machine's costs measured

    def __post_init__(self) -> None:
        options.check(self)

    def fresh(self: P) -> P:
        """A new policy of the same settings for another sequence."""
        return dataclasses.replace(self)

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        """The next draft pass, or None to stop drafting."""
        raise NotImplementedError

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        """The nodes to verify, ascending, parents of kept nodes kept; node 0 alone is plain decoding."""
        return torch.arange(len(tree))

    def observe(self, step: Step) -> None:
        """Learn from what was accepted."""


def best(tree: DraftTree, nodes: Tensor, count: int, score: Tensor | None = None) -> Tensor:
    """The `count` nodes of the highest score, ascending; ties go to the shallower, then to the earlier node.

    With this tie rule the best nodes of a whole tree are closed under parents even where probabilities are exactly 1.
    `score` [N] replaces the tree's own; it must not rise from parent to child.
    """
    score = tree.score if score is None else score
    if count >= len(nodes):
        return nodes.sort().values
    if count > 0:  # all that reach the last place: usually exactly `count`, and always few enough to sort
        values = score[nodes]
        nodes = nodes[values >= values.topk(count).values[-1]]
    order = nodes[torch.argsort(tree.depth[nodes], stable=True)] if len(nodes) else nodes
    order = order[torch.argsort(score[order], descending=True, stable=True)]
    return order[:count].sort().values
