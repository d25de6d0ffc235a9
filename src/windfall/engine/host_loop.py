"""The decode loop on the host, which is the heart of windfall.

A cycle drafts a tree for every sequence, verifies all trees in one pass of the target, and keeps the tokens that the
target would have written itself. On a GPU, `engine.gpu` runs the same cycle on the device where it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from windfall.core.clock import Stopwatch, now
from windfall.core.tree import MAX_TREE_NODES, DraftTree
from windfall.core.types import Grow, InputError, Step
from windfall.costs.online import OnlineCosts
from windfall.drafters.base import Drafter
from windfall.engine.lockstep import Lockstep
from windfall.engine.sequence import Sequence
from windfall.engine.shared_budget import Grower, SharedBudgets
from windfall.model.target import Target
from windfall.policies.context import Context

if TYPE_CHECKING:
    from windfall.engine.gpu.host_policy import GraphTarget

USUAL_PENDING_TOKENS = 16  # a drafter that drafted in the last cycle has to take in no more than this


class HostLoop:
    """Decodes sequences together until each of them has ended."""

    def __init__(
        self,
        sequences: list[Sequence],
        target: Target | GraphTarget,
        drafter: Drafter,
        device: torch.device,
        online_costs: OnlineCosts,
        costs_are_of_gpu: bool = False,
        lockstep: Lockstep | None = None,
    ):
        """`costs_are_of_gpu`: the costs were measured in the GPU runner, where a pass takes less time than here."""
        self.sequences, self.target, self.drafter, self.lockstep = sequences, target, drafter, lockstep
        self.device, self.online_costs, self.costs_are_of_gpu = device, online_costs, costs_are_of_gpu
        self._drafted_length = 0  # length of the text at the last draft pass

    def run(self) -> Iterator[dict[int, Step]]:
        """After each cycle, the Step of every sequence that took part, by the sequence's place in the batch."""
        prefill_seconds = self._prefill()
        live = dict(enumerate(self.sequences))
        while live:
            steps = dict(zip(live, self._cycle(live, prefill_seconds), strict=True))
            prefill_seconds = 0.0
            going = [place for place, sequence in enumerate(live.values()) if not sequence.finish]
            if 0 < len(going) < len(live):
                self.target.retain(going)
                self.drafter.retain(going)
            live = {row: sequence for row, sequence in live.items() if not sequence.finish}
            yield steps

    def _prefill(self) -> float:
        """Target and drafter read the prompts; returns the seconds that this takes."""
        started = now(self.device)
        prompts = [list(sequence.tokens) for sequence in self.sequences]
        hidden = self.target.prefill(prompts, self.drafter.taps)
        self.drafter.start(prompts, hidden, [sequence.dice for sequence in self.sequences])
        return now(self.device) - started

    @cached_property
    def _budgets(self) -> SharedBudgets:
        return SharedBudgets(self.online_costs)

    @torch.inference_mode()
    def _cycle(self, rows: dict[int, Sequence], prefill_seconds: float) -> list[Step]:
        """One cycle of the sequences in these rows of the batch."""
        live, target, drafter, clock = list(rows.values()), self.target, self.drafter, Stopwatch()
        known_graphs = target.recordings
        alone = len(live) == 1
        learner = self.online_costs if self.online_costs.learns and alone else None  # batches share passes
        contexts = [sequence.begin_cycle(self.online_costs.costs, learner) for sequence in live]

        # Draft: every policy, or the budget of several, asks for passes that extend a tree, until none wants another.
        deciders = self._budgets.begin(live, contexts)
        drafted = drafter.begin([sequence.tokens[-1] for sequence in live])
        growths = [Growth(grower, context) for grower, context in zip(deciders.growers, contexts, strict=True)]
        passes: list[tuple[int, float]] = []  # expanded nodes and seconds of the passes that found children
        while any(grows := [growth.next(tree) for growth, tree in zip(growths, drafted, strict=True)]):
            clock.lap("policy")
            size = sum(map(len, drafted))
            drafted = drafter.expand(drafted, grows)
            seconds = clock.lap("draft")
            if sum(map(len, drafted)) > size:
                passes.append((sum(len(grow.nodes) for grow in grows if grow), seconds))

        # Select the nodes that are worth verifying.
        kept = deciders.select(drafted)
        trees = [tree.select(keep) for tree, keep in zip(drafted, kept, strict=True)]
        clock.lap("policy")

        # Verify all trees in one pass, and follow the target's own draws down each tree.
        scores = target.score(trees)
        if self.lockstep is None:
            verdicts = [s.walk_tree(tree, score) for s, tree, score in zip(live, trees, scores, strict=True)]
        else:
            verdicts = self.lockstep.walk_trees(rows, trees, scores)
        paths = [verdict.path for verdict in verdicts]
        target.commit(paths)
        verify_seconds = clock.lap("verify")

        # Commit: the drafter keeps the accepted paths too, and gets the target's hidden states on them.
        drafted_paths = [torch.from_numpy(keep.numpy()[path.numpy()]) for keep, path in zip(kept, paths, strict=True)]
        scored = [(score.hidden, path) for score, path in zip(scores, paths, strict=True) if score.hidden is not None]
        hidden = [target.states(states, path) for states, path in scored] or None
        drafter.commit(drafted, drafted_paths, [verdict.bonus for verdict in verdicts], hidden)
        clock.lap("draft")

        # Report, and learn from the outcome.
        emitted = [s.accept(tree, verdict) for s, tree, verdict in zip(live, trees, verdicts, strict=True)]
        clock.lap("other")
        recorded = target.recordings > known_graphs
        steps = [
            Step(
                *emitted[i], trees[i], paths[i], drafted[i], kept[i], growths[i].passes, clock.split, s.finish, recorded
            )
            for i, s in enumerate(live)
        ]
        if not recorded and self.online_costs.learns:
            verified, length = sum(map(len, trees)), sum(context.length for context in contexts)
            self._learn_costs(learner or self._budgets.costs, length, passes, verified, verify_seconds, alone)
        deciders.observe(steps)
        for sequence, step in zip(live, steps, strict=True):
            sequence.observe(step)
        clock.lap("policy")
        return [replace(step, seconds=clock.split, prefill_seconds=prefill_seconds) for step in steps]

    def _learn_costs(
        self,
        learner: OnlineCosts,
        length: int,
        passes: list[tuple[int, float]],
        verified_rows: int,
        verify_seconds: float,
        alone: bool,
    ) -> None:
        """Correct the costs of passes by the times of a cycle. In a batch, rows and lengths are those of all requests,
        and nothing is learned from the first draft pass, whose time depends on the number of requests."""
        slower = self.costs_are_of_gpu
        if passes and alone:
            many_pending = length - self._drafted_length > USUAL_PENDING_TOKENS
            learner.record_drafts([0], passes[0][1], slower or many_pending)
            self._drafted_length = length
        for width, seconds in passes[1:]:
            learner.record_drafts([width], seconds, slower)
        learner.record_verify(verified_rows, length, verify_seconds, slower)


class Growth:
    """Asks a policy or a shared round for its next draft pass, and leaves out what is not possible."""

    def __init__(self, policy: Grower, context: Context):
        self.policy, self.context = policy, context
        self.passes = 0
        self._expanded: set[int] = set()
        self._over = False

    def next(self, tree: DraftTree) -> Grow | None:
        """The policy's request, without nodes that were expanded before or lie too deep to be emitted."""
        grow = None if self._over else self.policy.grow(tree, self.context)
        nodes = [] if grow is None else self._possible(tree, grow)
        if grow is None or not nodes:
            self._over = True
            return None
        if (size := len(tree) + len(nodes) * grow.k) > MAX_TREE_NODES:
            raise InputError(
                f"a draft tree has {MAX_TREE_NODES} nodes at most; this pass would make {size}: use fewer children"
            )
        self._expanded.update(nodes)
        self.passes += 1
        return grow if len(nodes) == grow.nodes.numel() else grow._replace(nodes=torch.tensor(nodes))

    def _possible(self, tree: DraftTree, grow: Grow) -> list[int]:
        deepest = self.context.room - 2  # a child at depth room - 1 and the target's own token fill the room
        nodes, depths = grow.nodes.tolist(), tree.arrays.depth[grow.nodes.numpy()].tolist()
        return [n for n, depth in zip(nodes, depths, strict=True) if depth <= deepest and n not in self._expanded]
