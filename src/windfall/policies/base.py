"""The contract of a tree policy: three hooks, called by the engine once a cycle."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from windfall.core import options
from windfall.core.errors import InputError
from windfall.core.tree import DraftTree
from windfall.core.types import Grow, Step
from windfall.policies.budget import Budget, OwnSizes
from windfall.policies.context import Context
from windfall.policies.interpreter import PlannedTree
from windfall.policies.plan import Plan

P = TypeVar("P", bound="TreePolicy")
NEVER = 1e-30  # a probability that no path falls below


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

    def rehearsal(self: P) -> P:
        """A copy that shares no state: what it learns does not reach this policy."""
        made = copy.deepcopy(self)
        made.__dict__.pop("cached_plan", None)  # its callbacks may belong to this policy
        return made

    def plan(self) -> Plan | None:
        """The description of its trees that the host and the GPU follow; None: it writes `grow` and `select`."""
        return None

    @cached_property
    def cached_plan(self) -> Plan | None:
        """`plan()`, made once."""
        return self.plan()

    def budget(self) -> Budget | None:
        """Decides for a batch of requests with this policy, once a round; None: each request decides for itself.

        The default is the fixed sizes of a plan that decides nothing during a cycle.
        """
        plan, own = self.cached_plan, type(self)
        if plan is None or plan.decide or plan.opening:
            return None
        return OwnSizes(plan) if (own.grow, own.select) == (TreePolicy.grow, TreePolicy.select) else None

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        """The next draft pass, or None to stop drafting."""
        if len(tree) == 1:
            plan = self.cached_plan
            if plan is None:
                raise InputError(f"the policy {type(self).__name__} needs a method plan or grow")
            self.start_cycle(ctx)
            self._planned = PlannedTree(plan, ctx)
        return self._planned.grow(tree)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        """The nodes to verify, ascending, parents of kept nodes kept; node 0 alone is plain decoding."""
        if len(tree) == 1 or self.cached_plan is None:
            return torch.arange(len(tree))
        return self._planned.select(tree)

    def start_cycle(self, ctx: Context) -> None:
        """Note what `observe` will need about this cycle. Called once a cycle, before drafting."""

    def observe(self, step: Step) -> None:
        """Learn from what was accepted."""
