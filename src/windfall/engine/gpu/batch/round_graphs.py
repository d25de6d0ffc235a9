"""The passes of a round as CUDA graphs, and which of them are captured."""

from __future__ import annotations

from functools import partial

from windfall.engine.gpu.batch.round import Round
from windfall.engine.gpu.batch.target import Kind
from windfall.engine.gpu.cycle import kernel_rule
from windfall.engine.gpu.graphs import GraphCache, Key
from windfall.kernels.rules import Rule
from windfall.policies.budget import Budget, Preparation, Sizes


class RoundGraphs(Preparation):
    """Runs the passes of one round.

    Few graphs are captured: all draft passes but the first share one, and a verify pass has one for each number of
    rows, however the trees were drafted. The draft passes of a block head are one graph.
    """

    def __init__(self, cache: GraphCache, work: Round, budget: Budget, seats: int, kind: Kind, pending: int):
        """`seats` of the requests, and an upper bound on the `pending` tokens that the first draft pass takes in."""
        self._cache, self._work, self._budget = cache, work, budget
        self._seats, self._kind, self._pending = seats, kind, pending
        self._fixed = (work.state, seats, kind, work.state.span)

    def run_drafts(self, sizes: Sizes, rule: Rule) -> None:
        """All draft passes."""
        shape, work, cache = Sizes(1, sizes.width, sizes.k, 0), self._work, self._cache
        first, *later = self._draft_keys(sizes.passes, shape, rule)
        if self._at_once:
            shape = shape._replace(passes=self._at_once)
            cache.run(first, partial(work.draft_passes, self._seats, shape, self._pending, rule, self._kind))
            return
        cache.run(first, partial(work.first_draft_pass, self._seats, shape, self._pending, rule, self._kind))
        for _ in range(1, sizes.passes):
            cache.run(later[0], partial(work.next_draft_pass, self._seats, shape, rule, self._kind))

    def complete(self, sizes: Sizes) -> Sizes:
        """The sizes that run: a block head drafts all its levels, up to the most passes of the budget's rounds."""
        return sizes._replace(passes=self._at_once) if self._at_once and sizes.passes else sizes

    @property
    def _at_once(self) -> int:
        """Draft passes of a block head, which are one graph: later ones are too short for graphs. 0: no block head."""
        drafter = self._work.drafter
        return 0 if drafter is None else min(drafter.levels, self._work.state.pending - 1)

    def run_verify(self, sizes: Sizes, prompts: int = 0) -> None:
        """The verify pass, with this number of rows of waiting prompts."""
        work = partial(self._work.verify, self._seats, _verified(sizes), self._kind, prompts)
        self._cache.run(self._verify_key(_verified(sizes), prompts), work)

    def missing_shared_seconds(self, sizes: Sizes, prompts: int) -> float:
        """How long it takes to capture the verify pass with rows of prompts; 0 if it is captured."""
        return self._cache.missing_seconds(self._verify_key(_verified(sizes), prompts))

    def take_in(self) -> None:
        """Let the drafter take in the pending tokens without a draft."""
        drafter = self._work.drafter
        assert drafter is not None
        key = ("take in", self._pending, *self._fixed)
        self._cache.run(key, partial(drafter.take_in, self._seats, self._pending))

    def drafts(self, passes: int, width: int) -> float:
        largest = self._budget.largest
        assert largest is not None
        shape = Sizes(1, width, largest.k, 0, calibrated=largest.calibrated)
        plan = self._budget.plan(shape)
        if plan is None:  # the budget has a single shape
            return 0.0
        return sum(map(self._cache.missing_seconds, self._draft_keys(passes, shape, kernel_rule(plan))))

    def verify(self, rows: int) -> float:
        return self._cache.missing_seconds(self._verify_key(Sizes(1, 1, 1, rows)))

    def _draft_keys(self, passes: int, shape: Sizes, rule: Rule) -> list[Key]:
        """Of the first pass and, if there are more, of the others; or of all passes."""
        fixed = (shape.width, shape.k, rule, *self._fixed)
        if self._at_once:
            return [("draft passes", self._at_once, self._pending, *fixed)]
        keys: list[Key] = [("first draft pass", self._pending, *fixed), ("draft pass", *fixed)]
        return keys[: min(passes, 2)]

    def _verify_key(self, shape: Sizes, prompts: int = 0) -> Key:
        return ("verify" if shape.passes else "step", shape.rows, prompts, *self._fixed)


def _verified(sizes: Sizes) -> Sizes:
    """What a verify pass depends on: its rows, and whether they are trees."""
    return Sizes(min(sizes.passes, 1), 1, 1, sizes.rows)
