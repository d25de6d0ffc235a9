"""The decode loop on the host, which is the heart of windfall.

A cycle drafts a tree for every sequence, verifies all trees in one pass of the target, and keeps the tokens that the
target would have written itself. On a GPU, `engine.gpu` runs the same cycle on the device where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from windfall.core.clock import Stopwatch, now
from windfall.core.tree import MAX_TREE_NODES, DraftTree
from windfall.core.types import Grow, InputError, Scores, Step, Verdict
from windfall.costs.online import OnlineCosts
from windfall.drafters.base import Drafter
from windfall.engine.batch_runner import Outcome
from windfall.engine.lockstep import Lockstep
from windfall.engine.sequence import Sequence
from windfall.engine.shared_budget import Grower, SharedBudgets
from windfall.model.target import Target
from windfall.policies.context import Context

if TYPE_CHECKING:
    from windfall.engine.gpu.host_policy import GraphTarget

T = TypeVar("T")

NOTHING: tuple[tuple[int, ...], str] = ((), "")  # tokens and text of a sequence that failed
TREE_ROWS = 64  # of a sequence in a cycle, as the budget of memory counts them
USUAL_PENDING_TOKENS = 16  # a drafter that drafted in the last cycle has to take in no more than this


class HostLoop:
    """Decodes sequences together, which join and leave between cycles. It is a BatchRunner."""

    def __init__(
        self,
        target: Target | GraphTarget,
        drafter: Drafter,
        device: torch.device,
        online_costs: OnlineCosts,
        costs_are_of_gpu: bool = False,
        lockstep: Lockstep | None = None,
        memory: int | None = None,
    ):
        """`costs_are_of_gpu`: the costs were measured in the GPU runner, where a pass takes less time than here.

        `memory`: bytes for the KV caches of target and drafter, as `fits` counts them; None: no limit.
        """
        self.target, self.drafter, self.lockstep, self.memory = target, drafter, lockstep, memory
        self.device, self.online_costs, self.costs_are_of_gpu = device, online_costs, costs_are_of_gpu
        self.live: dict[int, Sequence] = {}  # by the number of sequences that joined before, in the order of the caches
        self._joined = 0  # sequences so far
        self._prefill_seconds: dict[Sequence, float] = {}  # of sequences whose first cycle is to come
        self._failed: dict[Sequence, Exception] = {}  # in this cycle
        self._walked = False  # whether this cycle has called processors and criteria, which may keep state
        self._drafted_length = 0  # length of the text at the last draft pass

    def run(self, sequences: list[Sequence]) -> Iterator[dict[int, Step]]:
        """Decode these sequences until each has ended: after each cycle, the Step of every sequence that took part, by
        its place in the list. The caches keep the sequences that end last."""
        self.join(sequences)
        while self.live:
            places = {sequence: place for place, sequence in self.live.items()}
            steps = {places[sequence]: raised(outcome) for sequence, outcome in self.round().items()}
            ended = [sequence for sequence in places if sequence.finish]
            if len(ended) < len(places):
                self.leave(ended)
            else:
                self.live = {}
            yield steps

    def join(self, sequences: list[Sequence]) -> None:
        """Prefill these sequences, and add them to the caches."""
        if not sequences:
            return
        started, running, self._drafted_length = now(self.device), list(self.live.values()), 0
        try:
            if running and self.drafter.can_join:
                prompts, dice = [list(each.tokens) for each in sequences], [each.dice for each in sequences]
                assert isinstance(self.target, Target)
                self.drafter.join(prompts, self.target.join(prompts), dice)
            else:
                self._start([*running, *sequences])
        except Exception:
            self._start(running)
            raise
        for sequence in sequences:
            self.live[self._joined] = sequence
            self._joined += 1
        seconds = now(self.device) - started
        self._prefill_seconds.update(dict.fromkeys(sequences, seconds))

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """Remove these sequences from the caches."""
        leaving = set(sequences)
        keep = [place for place, sequence in enumerate(self.live.values()) if sequence not in leaving]
        if len(keep) == len(self.live):
            return
        self.live = {number: sequence for number, sequence in self.live.items() if sequence not in leaving}
        for sequence in leaving:
            self._prefill_seconds.pop(sequence, None)
        if keep:
            self.target.retain(keep)
            self.drafter.retain(keep)
        else:
            self._start([])

    def round(self) -> dict[Sequence, Outcome]:
        """One cycle of all sequences. If it fails as a whole, each sequence repeats it alone."""
        try:
            return self._round()
        except Exception as error:
            if self._walked or self.lockstep is not None:
                raise
            if len(self.live) == 1:
                return dict.fromkeys(self.live.values(), error)
            return self._round_one_by_one()

    def fits(self, lengths: Iterable[int]) -> bool:
        """The caches are padded: each sequence takes as many rows as the longest, and those of its tree."""
        known = list(lengths)
        rows = len(known) * (max(known, default=0) + TREE_ROWS)
        return self.memory is None or rows * self._row_bytes <= self.memory

    @property
    def max_length(self) -> int | None:
        """The number of tokens up to which a single sequence fits."""
        return None if self.memory is None else self.memory // self._row_bytes - TREE_ROWS

    @property
    def _row_bytes(self) -> int:
        assert isinstance(self.target, Target)
        return self.target.decoder.row_bytes + self.drafter.row_bytes

    def _start(self, sequences: list[Sequence]) -> None:
        """Empty the caches, and prefill these sequences together."""
        prompts, taps = [list(sequence.tokens) for sequence in sequences], self.drafter.taps
        hidden: list[Tensor] | None = [] if taps else None
        if prompts or isinstance(self.target, Target):
            hidden = self.target.prefill(prompts, taps)
        if prompts or self.drafter.can_join:  # other drafters may not expect an empty list
            self.drafter.start(prompts, hidden, [sequence.dice for sequence in sequences])

    def _round(self) -> dict[Sequence, Outcome]:
        self._failed, self._walked = {}, False
        steps = dict(zip(self.live.values(), self._cycle(self.live), strict=True))
        waits = self._prefill_seconds
        done = {
            sequence: replace(step, prefill_seconds=waits.pop(sequence)) if sequence in waits else step
            for sequence, step in steps.items()
        }
        return {**done, **self._failed}

    def _round_one_by_one(self) -> dict[Sequence, Outcome]:
        """A cycle of each sequence alone; those that fail are left out afterwards."""
        everyone, outcomes = self.live, dict[Sequence, Outcome]()
        for number, sequence in everyone.items():
            try:
                self.live = {number: sequence}
                self._start([sequence])
                outcomes.update(self._round())
            except Exception as error:
                outcomes[sequence] = error
        self.live = {n: each for n, each in everyone.items() if not isinstance(outcomes[each], Exception)}
        self._start(list(self.live.values()))
        return outcomes

    def _attempt(self, sequence: Sequence, call: Callable[..., T], *given: Any, otherwise: T) -> T:
        """The result of a call for one sequence. If it raises, this sequence fails and the others go on."""
        if sequence in self._failed:
            return otherwise
        try:
            return call(*given)
        except Exception as error:
            self._failed[sequence] = error
            return otherwise

    def _walk(self, sequence: Sequence, tree: DraftTree, scores: Scores) -> Verdict:
        self._walked = True
        nothing = Verdict(torch.tensor([0]), sequence.tokens[-1])
        return self._attempt(sequence, sequence.walk_tree, tree, scores, otherwise=nothing)

    @cached_property
    def _budgets(self) -> SharedBudgets:
        return SharedBudgets(self.online_costs)

    @torch.inference_mode()
    def _cycle(self, rows: dict[int, Sequence]) -> list[Step]:
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
            verdicts = [self._walk(s, tree, score) for s, tree, score in zip(live, trees, scores, strict=True)]
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
        emitted = [
            self._attempt(s, s.accept, tree, verdict, otherwise=NOTHING)
            for s, tree, verdict in zip(live, trees, verdicts, strict=True)
        ]
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
            self._attempt(sequence, sequence.observe, step, otherwise=None)
        clock.lap("policy")
        return [replace(step, seconds=clock.split) for step in steps]

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


def raised(outcome: Outcome) -> Step:
    """The Step; an exception is raised."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


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
