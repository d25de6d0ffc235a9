"""The requests of a batch whose policies are equal share one budget; the others decide for themselves."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from torch import Tensor

from windfall.core.tree import DraftTree
from windfall.core.types import Grow, Step
from windfall.costs.online import OnlineCosts
from windfall.engine.sequence import Sequence
from windfall.policies.base import TreePolicy
from windfall.policies.budget import Budget, Sizes
from windfall.policies.context import Context
from windfall.policies.round import Round


class Grower(Protocol):
    """Asks for draft passes: a policy, or a request of a shared round."""

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        """The next draft pass, or None to stop drafting."""


class SharedBudgets:
    """The budgets of a batch. They last as long as the batch: requests may join and leave between rounds."""

    def __init__(self, online_costs: OnlineCosts):
        """Costs of batches are corrected apart from those of single texts, whose passes do other work per row."""
        self.costs = OnlineCosts(online_costs.costs, online_costs.learns)
        self._budgets: list[tuple[TreePolicy, Budget | None]] = []

    def begin(self, live: Many[Sequence], contexts: Many[Context]) -> BatchRound:
        """A new round of these requests."""
        groups: list[list[int]] = [[] for _ in self._budgets]
        for place, sequence in enumerate(live):
            group = self._group(sequence.policy)
            groups += [[] for _ in range(group + 1 - len(groups))]
            groups[group].append(place)
        made = BatchRound(live, contexts)
        for members, (_, budget) in zip(groups, self._budgets, strict=True):
            if budget is not None and len(members) > 1:  # a lone request can decide during its cycle
                made.share(members, budget, self.costs)
        return made

    def _group(self, policy: TreePolicy) -> int:
        """The place of this policy's budget."""
        for place, (known, _) in enumerate(self._budgets):
            if type(known) is type(policy) and known == policy:
                return place
        self._budgets.append((policy, policy.budget()))
        return len(self._budgets) - 1


class BatchRound:
    """Who decides for each request of this round."""

    def __init__(self, live: Many[Sequence], contexts: Many[Context]):
        self._live, self._contexts = live, contexts
        self._rounds: list[tuple[list[int], Round]] = []
        self.growers: list[Grower] = [sequence.policy for sequence in live]

    def share(self, members: list[int], budget: Budget, costs: OnlineCosts) -> None:
        """Let a budget decide for these requests."""
        policies = [self._live[place].policy for place in members]
        made = Round(budget, policies, [self._contexts[place] for place in members], costs.costs)
        self._rounds.append((members, made))
        for place, member in zip(members, made.members, strict=True):
            self.growers[place] = member

    @property
    def sizes(self) -> Sizes | None:
        """The sizes of the first budget that requests share; None: none do."""
        return self._rounds[0][1].sizes if self._rounds else None

    def select(self, trees: Many[DraftTree]) -> list[Tensor]:
        """The nodes to verify of each tree."""
        found: dict[int, Tensor] = {}
        for members, shared in self._rounds:
            found.update(zip(members, shared.select([trees[place] for place in members]), strict=True))
        return [
            found[place] if place in found else sequence.policy.select(trees[place], self._contexts[place])
            for place, sequence in enumerate(self._live)
        ]

    def observe(self, steps: Many[Step]) -> None:
        """Let the budgets learn from the round."""
        for members, shared in self._rounds:
            shared.observe([steps[place] for place in members])
