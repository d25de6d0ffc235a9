"""The base of policies that are a budget: one request is a batch of one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from windfall.core.tree import DraftTree
from windfall.core.types import Grow, Step
from windfall.policies.base import TreePolicy
from windfall.policies.budget import Budget
from windfall.policies.context import Context
from windfall.policies.round import Round


@dataclass
class SharedPolicy(TreePolicy):
    """Decides before each round for all requests of a batch together. Subclasses write `budget`."""

    uses_costs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._round: Round | None = None

    def budget(self) -> Budget:
        raise NotImplementedError

    @cached_property
    def _own_budget(self) -> Budget:
        return self.budget()

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        if len(tree) == 1:
            self._round = Round(self._own_budget, [self], [ctx], ctx.costs)
        assert self._round is not None
        return self._round.members[0].grow(tree, ctx)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        assert self._round is not None
        return self._round.select([tree])[0]

    def observe(self, step: Step) -> None:
        done, self._round = self._round, None
        if done is not None:  # None: the round was decided for a batch
            done.observe([step])
