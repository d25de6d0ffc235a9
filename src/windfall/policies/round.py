"""A round of a batch on the host: every request's tree grows by the budget's sizes, then rows are chosen for all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from windfall.core.tree import DraftTree, Integers
from windfall.core.types import Grow, Step
from windfall.costs.curves import Costs
from windfall.policies.base import TreePolicy
from windfall.policies.budget import Budget, Load, Outcome
from windfall.policies.choice import choose
from windfall.policies.context import Context
from windfall.policies.interpreter import PlannedTree


class Member:
    """One request of a round: it grows by the round's sizes."""

    def __init__(self, planned: PlannedTree):
        self.planned = planned

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        """The next draft pass, or None to stop drafting."""
        return self.planned.grow(tree)


class Round:
    """One round of the requests that share a budget."""

    def __init__(self, budget: Budget, policies: Sequence[TreePolicy], contexts: Sequence[Context], costs: Costs):
        """`costs` are those of a batch's passes."""
        self._budget, count = budget, len(contexts)
        length, room = sum(ctx.length for ctx in contexts), max(ctx.room for ctx in contexts)
        self.sizes = budget.sizes(Load(count, length, room, costs, contexts[0].calibrator))
        shared = budget.plan(self.sizes)
        self.members: list[Member] = []
        for policy, ctx in zip(policies, contexts, strict=True):
            ctx = ctx._replace(requests=count, calibrator=budget.calibrator or ctx.calibrator)
            policy.start_cycle(ctx)
            plan = shared or policy.cached_plan
            assert plan is not None, "a budget without a plan is for policies that have one"
            self.members.append(Member(PlannedTree(plan, ctx)))

    def select(self, trees: Sequence[DraftTree]) -> list[Tensor]:
        """The nodes to verify of each request's tree."""
        found = [member.planned.candidates(tree) for member, tree in zip(self.members, trees, strict=True)]
        counts = [len(nodes) - 1 for nodes, _ in found]  # without the root
        owner = np.repeat(np.arange(len(trees)), counts)
        chosen = choose(owner, np.concatenate([keys[1:] for _, keys in found]), len(trees), self.sizes)
        ends = np.cumsum(counts)
        return [
            torch.from_numpy(nodes[np.concatenate([[True], chosen[end - count : end]])])
            for (nodes, _), end, count in zip(found, ends, counts, strict=True)
        ]

    def observe(self, steps: Sequence[Step]) -> None:
        """Tell the budget what became of the round."""
        seconds = 0.0 if steps[0].recorded else steps[0].seconds.total
        self._budget.observe(self._outcome(steps, seconds))

    def _outcome(self, steps: Sequence[Step], seconds: float) -> Outcome:
        starts = np.cumsum([0, *(len(step.drafted) - 1 for step in steps)])  # of each request's drafted nodes
        size = int(starts[-1])
        owner = np.repeat(np.arange(len(steps)), np.diff(starts))
        known = [step.drafted.arrays for step in steps]
        parents, keys = np.full(size, -1), np.full(size, -np.inf)
        expanded, verified, accepted = (np.zeros(size, bool) for _ in range(3))
        for start, step, tree, member in zip(starts, steps, known, self.members, strict=False):
            if len(step.drafted) == 1:
                continue
            own = slice(start, start + len(step.drafted) - 1)
            above = tree.parents[1:]
            parents[own] = np.where(above > 0, above - 1 + start, -1)
            nodes, values = member.planned.candidates(step.drafted)
            keys[start - 1 + nodes[1:]] = values[1:]
            _mark(expanded, start, member.planned.expanded)
            _mark(verified, start, step.kept.numpy())
            _mark(accepted, start, step.kept.numpy()[step.path.numpy()])
        depth, rank, logq = (
            np.concatenate([getattr(tree, name)[1:] for tree in known]) for name in ("depth", "rank", "logq")
        )
        return Outcome(
            self.sizes, len(steps), owner, parents, depth, rank, logq, keys, expanded, verified, accepted, seconds
        )


def _mark(flags: np.ndarray, start: int, nodes: Integers) -> None:
    """Set the flags of a request's nodes; its root has none."""
    flags[start - 1 + nodes[nodes > 0]] = True
