"""The decode loop on the host, which is the heart of windfall.

A cycle drafts a tree for every sequence, verifies all trees in one pass of the target, and keeps the tokens that the
target would have written itself. On a GPU, `engine.gpu` runs the same cycle on the device where it can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from windfall.core.clock import Stopwatch
from windfall.core.logprobs import token_logprobs_of_all
from windfall.core.tree import MAX_TREE_NODES, DraftTree
from windfall.core.types import Grow, InputError, Scores, Step, Verdict
from windfall.costs.online import OnlineCosts
from windfall.drafters.base import Drafter
from windfall.engine.lockstep import Lockstep
from windfall.engine.sequence import Sequence
from windfall.engine.shared_budget import BatchRound, Grower, SharedBudgets
from windfall.grammar.guide import Guide
from windfall.policies.budget import Sizes
from windfall.policies.context import Context

T = TypeVar("T")

NOTHING: tuple[tuple[int, ...], str] = ((), "")  # tokens and text of a sequence that failed
USUAL_PENDING_TOKENS = 16  # a drafter that drafted in the last cycle has to take in no more than this


class LoopTarget(Protocol):
    """What the loop needs from a target. Lists have one entry for each sequence, always in the same order."""

    @property
    def recordings(self) -> int:
        """CUDA graphs captured so far."""

    def prefill(self, prompts: list[list[int]], taps: tuple[int, ...] = ()) -> list[Tensor] | None:
        """Start new sequences; returns the states at `taps` of all tokens but the last."""

    def join(self, prompts: list[list[int]]) -> list[Tensor] | None:
        """Add sequences to those that run; returns what `prefill` returned for them, at the same taps."""

    def score(self, trees: list[DraftTree]) -> list[Scores]:
        """One pass over all trees."""

    def commit(self, paths: list[Tensor]) -> None:
        """Keep the rows of these nodes of the trees last scored."""

    def states(self, scores: list[Scores], paths: list[Tensor]) -> list[Tensor] | None:
        """The hidden states [N, taps * H] of committed paths; None if the passes have none."""

    def retain(self, keep: list[int]) -> None:
        """Keep these sequences only."""


class HostLoop:
    """Runs the cycles of sequences that are decoded together."""

    def __init__(
        self,
        target: LoopTarget,
        drafter: Drafter,
        online_costs: OnlineCosts,
        costs_are_of_gpu: bool = False,
        lockstep: Lockstep | None = None,
    ):
        """`costs_are_of_gpu`: the costs were measured in the GPU runner, where a pass takes less time than here."""
        self.target, self.drafter, self.lockstep = target, drafter, lockstep
        self.online_costs, self.costs_are_of_gpu = online_costs, costs_are_of_gpu
        self.failed: dict[Sequence, Exception] = {}  # in the last cycle; the Steps of these sequences do not count
        self.walked = False  # whether the last cycle has called processors and criteria, which may keep state
        self.drafted_length = 0  # length of the text at the last draft pass
        self.budget: Sizes | None = None  # that sequences shared in the last cycle; with several, the first

    @torch.inference_mode()
    def cycle(self, rows: dict[int, Sequence]) -> list[Step]:
        """One cycle of the sequences in these rows of the batch, in the order of the caches."""
        self.failed, self.walked = {}, False
        cycle = self._begin(list(rows.values()))
        self._draft(cycle)
        trees = self._select(cycle)
        scores = self.target.score(trees)
        verdicts = self._walk_all(rows, cycle, trees, scores)
        self._commit(cycle, scores, verdicts)
        steps = self._report(cycle, trees, verdicts)
        return self._learn(cycle, steps)

    def _begin(self, live: list[Sequence]) -> Cycle:
        """A tree with one node, the last token, for every sequence, and who decides how it grows."""
        alone = len(live) == 1
        learner = self.online_costs if self.online_costs.learns and alone else None  # batches share passes
        clock, known_graphs = Stopwatch(), self.target.recordings
        contexts = [sequence.begin_cycle(self.online_costs.costs, learner) for sequence in live]
        deciders = self._budgets.begin(live, contexts)
        self.budget = deciders.sizes
        drafted = self.drafter.begin([sequence.tokens[-1] for sequence in live])
        return Cycle(live, contexts, deciders, drafted, clock, known_graphs)

    def _draft(self, cycle: Cycle) -> None:
        """Every policy, or the budget of several, asks for passes that extend a tree, until none wants another."""
        live, clock = cycle.live, cycle.clock
        while any(grows := [growth.next(tree) for growth, tree in zip(cycle.growths, cycle.drafted, strict=True)]):
            clock.lap("policy")
            size = sum(map(len, cycle.drafted))
            drafted = self.drafter.expand(cycle.drafted, grows)
            seconds = clock.lap("draft")
            cycle.drafted = [s.guide.rate(tree) if s.guide else tree for s, tree in zip(live, drafted, strict=True)]
            if sum(map(len, cycle.drafted)) > size:
                cycle.passes.append((sum(len(grow.nodes) for grow in grows if grow), seconds))

    def _select(self, cycle: Cycle) -> list[DraftTree]:
        """The trees of the nodes that are worth verifying."""
        drafted, kept = cycle.drafted, cycle.deciders.select(cycle.drafted)
        cycle.own_sizes = [*map(len, drafted)]
        for i, sequence in enumerate(cycle.live):
            drafted[i], kept[i] = sequence.choose_legal(drafted[i], kept[i], cycle.contexts[i].room)
        cycle.kept = kept
        trees = [tree.select(keep) for tree, keep in zip(drafted, kept, strict=True)]
        cycle.clock.lap("policy")
        return trees

    def _walk_all(
        self, rows: dict[int, Sequence], cycle: Cycle, trees: list[DraftTree], scores: list[Scores]
    ) -> list[Verdict]:
        """Follow the target's own draws down each tree."""
        if self.lockstep is not None:
            return self.lockstep.walk_trees(rows, trees, scores)
        verdicts = [self._walk(s, tree, score) for s, tree, score in zip(cycle.live, trees, scores, strict=True)]
        self._add_logprobs(cycle.live, trees, scores, verdicts)
        return verdicts

    def _commit(self, cycle: Cycle, scores: list[Scores], verdicts: list[Verdict]) -> None:
        """Keep the accepted paths. The drafter does too, and gets the target's hidden states on them."""
        target, paths = self.target, [verdict.path for verdict in verdicts]
        target.commit(paths)
        cycle.verify_seconds = cycle.clock.lap("verify")
        kept = zip(cycle.kept, paths, strict=True)
        drafted_paths = [torch.from_numpy(keep.numpy()[path.numpy()]) for keep, path in kept]
        hidden = target.states(scores, paths)
        self.drafter.commit(cycle.drafted, drafted_paths, [verdict.bonus for verdict in verdicts], hidden)
        cycle.clock.lap("draft")

    def _report(self, cycle: Cycle, trees: list[DraftTree], verdicts: list[Verdict]) -> list[Step]:
        """Add the tokens to the texts, and say what the cycle has done."""
        emitted = [
            self._attempt(s, s.accept, tree, verdict, otherwise=NOTHING)
            for s, tree, verdict in zip(cycle.live, trees, verdicts, strict=True)
        ]
        cycle.clock.lap("other")
        cycle.recorded = self.target.recordings > cycle.known_graphs
        steps = [
            Step(
                *emitted[i],
                trees[i],
                verdicts[i].path,
                cycle.drafted[i],
                cycle.kept[i],
                cycle.growths[i].passes,
                cycle.clock.split,
                s.finish,
                cycle.recorded,
            )
            for i, s in enumerate(cycle.live)
        ]
        return list(map(_with_logprobs, steps, verdicts))

    def _learn(self, cycle: Cycle, steps: list[Step]) -> list[Step]:
        """Let costs and policies learn from the outcome; returns the Steps with all times."""
        if self.online_costs.learns and not cycle.recorded:
            self._learn_costs(cycle, sum(len(step.tree) for step in steps))
        own_steps = [step.of_policy(size) for step, size in zip(steps, cycle.own_sizes, strict=True)]
        cycle.deciders.observe(own_steps)
        for sequence, step in zip(cycle.live, own_steps, strict=True):
            self._attempt(sequence, sequence.observe, step, otherwise=None)
        cycle.clock.lap("policy")
        return [replace(step, seconds=cycle.clock.split) for step in steps]

    def _attempt(self, sequence: Sequence, call: Callable[..., T], *given: Any, otherwise: T) -> T:
        """The result of a call for one sequence. If it raises, this sequence fails and the others go on."""
        if sequence in self.failed:
            return otherwise
        try:
            return call(*given)
        except Exception as error:
            self.failed[sequence] = error
            return otherwise

    def _walk(self, sequence: Sequence, tree: DraftTree, scores: Scores) -> Verdict:
        self.walked = True
        nothing = Verdict(torch.tensor([0]), sequence.tokens[-1])
        return self._attempt(sequence, sequence.walk_tree, tree, scores, otherwise=nothing)

    def _add_logprobs(
        self, live: list[Sequence], trees: list[DraftTree], scores: list[Scores], verdicts: list[Verdict]
    ) -> None:
        """Compute the log-probabilities of the new tokens where they are wanted, for all sequences together."""
        wanted = [
            self._attempt(sequence, sequence.asked_logprobs, *given, otherwise=None)
            for sequence, *given in zip(live, trees, scores, verdicts, strict=True)
        ]
        found = iter(token_logprobs_of_all([asked for asked in wanted if asked is not None]))
        for place, asked in enumerate(wanted):
            if asked is not None:
                verdicts[place] = verdicts[place]._replace(logprobs=next(found))

    @cached_property
    def _budgets(self) -> SharedBudgets:
        return SharedBudgets(self.online_costs)

    def _learn_costs(self, cycle: Cycle, verified_rows: int) -> None:
        """Correct the costs of passes by the times of a cycle. In a batch, rows and lengths are those of all requests,
        and nothing is learned from the first draft pass, whose time depends on the number of requests."""
        alone, slower = len(cycle.live) == 1, self.costs_are_of_gpu
        learner = self.online_costs if alone else self._budgets.costs
        length, passes = sum(context.length for context in cycle.contexts), cycle.passes
        if passes and alone:
            many_pending = length - self.drafted_length > USUAL_PENDING_TOKENS
            learner.record_drafts([0], passes[0][1], slower or many_pending)
            self.drafted_length = length
        for width, seconds in passes[1:]:
            learner.record_drafts([width], seconds, slower)
        learner.record_verify(verified_rows, length, cycle.verify_seconds, slower)


def _with_logprobs(step: Step, verdict: Verdict) -> Step:
    """The Step with the log-probabilities of the tokens that the text takes, if they are wanted."""
    found = verdict.logprobs
    return step if found is None else replace(step, logprobs=found[: len(step.tokens)])


class Growth:
    """Asks a policy or a shared round for its next draft pass, and leaves out what is not possible."""

    def __init__(self, policy: Grower, context: Context, guide: Guide | None = None):
        self.policy, self.context, self.guide = policy, context, guide
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
        found = [n for n, depth in zip(nodes, depths, strict=True) if depth <= deepest and n not in self._expanded]
        return found if self.guide is None else list(filter(self.guide.allows, found))


@dataclass
class Cycle:
    """What a cycle of some sequences works on, each list in their order."""

    live: list[Sequence]
    contexts: list[Context]
    deciders: BatchRound
    drafted: list[DraftTree]
    clock: Stopwatch
    known_graphs: int  # captured before the cycle
    passes: list[tuple[int, float]] = field(default_factory=list)  # nodes and seconds of passes that found children
    own_sizes: list[int] = field(default_factory=list)  # nodes of the trees, without forced text
    kept: list[Tensor] = field(default_factory=list)  # nodes to verify
    verify_seconds: float = 0.0
    recorded: bool = False  # whether graphs were captured in the cycle

    @cached_property
    def growths(self) -> list[Growth]:
        members = zip(self.deciders.growers, self.contexts, self.live, strict=True)
        return [Growth(grower, context, sequence.guide) for grower, context, sequence in members]
