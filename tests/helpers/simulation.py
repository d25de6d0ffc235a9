"""Cycles on table models under a cost curve: expected tokens per second of any policy, in milliseconds."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from helpers.table import TableDrafter
from windfall.core.tree import DraftTree
from windfall.core.types import Split, Step
from windfall.core.verify import walk
from windfall.costs.acceptance import Calibrator
from windfall.costs.correction import Correction
from windfall.costs.curves import Costs
from windfall.costs.online import OnlineCosts
from windfall.engine.host_loop import Growth
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context


class Simulation:
    """The target draws from `target[last]`, the drafter believes `draft[last]`; both [V, V]."""

    def __init__(
        self,
        target: Tensor,
        draft: Tensor,
        costs: Costs,
        seed: int = 0,
        online_costs: OnlineCosts | None = None,
        noisy: bool = False,
    ):
        self.target, self.drafter, self.costs = target, TableDrafter(draft), costs
        self.online_costs, self.noisy = online_costs, noisy  # what is believed about the costs; whether times vary
        self.generator = torch.Generator().manual_seed(seed)
        self._random = random.Random(seed)
        self.calibrator = Calibrator()
        self.correction: Correction | None = None  # of the current text
        self.root = 0
        self.first_pass_extra = 0.0  # seconds by which the first draft pass of a cycle exceeds its cost

    def cycle(self, policy: TreePolicy) -> tuple[float, float, Step]:
        """Expected tokens and seconds of one cycle; what the policy learns from is drawn."""
        costs, online_costs = self.costs, self.online_costs
        believed, shift = (
            online_costs.costs if online_costs else costs,
            self.correction.shift if self.correction else 0.0,
        )
        context = Context(32, 64, 1.0, believed, self.calibrator, online_costs, shift)
        tree, growth, drafting = DraftTree.root(self.root), Growth(policy, context), 0.0
        while (grow := growth.next(tree)) is not None:
            taken = costs.draft(len(grow.nodes)) + (self.first_pass_extra if len(tree) == 1 else 0.0)
            if online_costs:
                online_costs.record_drafts([len(grow.nodes) if len(tree) > 1 else 0], taken * self._disturbance())
            tree = self.drafter.expand(tree, grow)
            drafting += taken
        keep = policy.select(tree, context)
        kept = tree.select(keep)
        taken = costs.verify(len(kept), context.length)
        if online_costs:
            online_costs.record_verify(len(kept), context.length, taken * self._disturbance())
        seconds = costs.overhead + drafting + taken
        tokens = self.expected(kept)
        verdict = walk(kept, lambda node: self.draw(int(kept.tokens[node])))
        emitted = (*kept.tokens[verdict.path[1:]].tolist(), verdict.bonus)
        step = Step(emitted, "", kept, verdict.path, tree, keep, growth.passes, Split(drafting, seconds - drafting))
        policy.observe(step)
        if self.correction:
            self.correction.observe(step, self.calibrator)
        self.calibrator.observe(step)
        self.root = verdict.bonus
        return tokens, seconds, step

    def _disturbance(self) -> float:
        """Times differ by a fifth, and one in thirty passes takes ten times as long."""
        if not self.noisy:
            return 1.0
        return self._random.uniform(0.8, 1.2) * (10 if self._random.random() < 1 / 30 else 1)

    def expected(self, tree: DraftTree) -> float:
        """1 + the target's probability of every node's path."""
        chances = self.target[tree.tokens[tree.parents[1:]], tree.tokens[1:]].tolist()
        reach = [1.0]
        for parent, chance in zip(tree.parents[1:].tolist(), chances, strict=True):
            reach.append(reach[parent] * chance)
        return sum(reach)

    def draw(self, token: int) -> int:
        return int(torch.multinomial(self.target[token], 1, generator=self.generator))

    def throughput(self, policy: TreePolicy, cycles: int, warm_up: int = 0) -> float:
        runs = [self.cycle(policy)[:2] for _ in range(warm_up + cycles)][warm_up:]
        return sum(tokens for tokens, _ in runs) / sum(seconds for _, seconds in runs)
