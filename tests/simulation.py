"""Cycles on table models under a cost curve: expected tokens per second of any policy, in milliseconds."""

from __future__ import annotations

import torch
from torch import Tensor

from table import TableDrafter
from windfall.calibration import Calibrator
from windfall.context import Context
from windfall.cost import Costs
from windfall.engine import Growth
from windfall.policies.base import TreePolicy
from windfall.records import Split, Step
from windfall.tree import DraftTree
from windfall.verify import walk


class Simulation:
    """The target draws from `target[last]`, the drafter believes `draft[last]`; both [V, V]."""

    def __init__(self, target: Tensor, draft: Tensor, costs: Costs, seed: int = 0):
        self.target, self.drafter, self.costs = target, TableDrafter(draft), costs
        self.generator = torch.Generator().manual_seed(seed)
        self.calibrator = Calibrator()
        self.root = 0

    def cycle(self, policy: TreePolicy) -> tuple[float, float, Step]:
        """Expected tokens and seconds of one cycle; what the policy learns from is drawn."""
        context = Context(32, 64, 1.0, self.costs, self.calibrator)
        tree, growth, seconds = DraftTree.root(self.root), Growth(policy, context), self.costs.overhead
        while (grow := growth.next(tree)) is not None:
            tree = self.drafter.expand(tree, grow)
            seconds += self.costs.draft(len(grow.nodes))
        keep = policy.select(tree, context)
        kept = tree.select(keep)
        seconds += self.costs.verify(len(kept), context.length)
        tokens = self.expected(kept)
        verdict = walk(kept, lambda node: self.draw(int(kept.tokens[node])))
        emitted = (*kept.tokens[verdict.path[1:]].tolist(), verdict.bonus)
        step = Step(emitted, "", kept, verdict.path, tree, keep, growth.passes, Split(verify=seconds))
        policy.observe(step)
        self.calibrator.observe(step)
        self.root = verdict.bonus
        return tokens, seconds, step

    def expected(self, tree: DraftTree) -> float:
        """1 + the target's probability of every node's path."""
        reach = torch.ones(len(tree), dtype=torch.float64)
        for node in range(1, len(tree)):
            parent = int(tree.parents[node])
            reach[node] = reach[parent] * float(self.target[tree.tokens[parent], tree.tokens[node]])
        return float(reach.sum())

    def draw(self, token: int) -> int:
        return int(torch.multinomial(self.target[token], 1, generator=self.generator))

    def throughput(self, policy: TreePolicy, cycles: int, warm_up: int = 0) -> float:
        runs = [self.cycle(policy)[:2] for _ in range(warm_up + cycles)][warm_up:]
        return sum(tokens for tokens, _ in runs) / sum(seconds for _, seconds in runs)
