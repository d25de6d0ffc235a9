"""Prepares a runner for the batches to come: it captures prefill passes and the usual rounds, and measures these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from windfall.engine.gpu.batch.round import ROUND_ROWS
from windfall.engine.gpu.batch.runner import MAX_FLIGHT, SEATS, GpuBatchRunner
from windfall.engine.sequence import Sequence
from windfall.policies.budget import Budget, Load, Sizes
from windfall.policies.plan import Plan

TURNS = 2  # of all sizes: the first captures, the second measures
Texts = Callable[[int, int], list[Sequence]]  # makes this number of texts, of at most this many tokens


def rehearse(runner: GpuBatchRunner, texts: Texts) -> Iterator[float]:
    """Decode new texts in rounds of all usual sizes; yields the finished share. No request may run.

    Nothing is learned about acceptance.
    """
    budget, levels = runner.budget, [seats for seats in SEATS if seats <= runner.limits.seats]
    try:
        runner.learns = False
        runner.state.capture_seat_changes()
        runner.prefill.capture()
        for place, seats in enumerate(reversed(levels)):
            usual = budget.usual_sizes(seats, ROUND_ROWS)
            runner.budget = Script(budget, TURNS * usual + _plain_rounds(runner, usual))
            made = partial(texts, seats, runner.max_length_of(seats))
            _play(runner, runner.budget, made)
            runner.budget = Script(budget, _different_verify_passes(usual))
            _play(runner, runner.budget, made, shares=True)
            yield (place + 1) / len(levels)
    finally:
        runner.budget, runner.learns = budget, True
        runner.pool.clear()  # the made-up texts are of no further use
        runner.prefill.take_spans()


def _plain_rounds(runner: GpuBatchRunner, usual: list[Sizes]) -> list[Sizes]:
    """Enough plain rounds in a row to make the drafter take in tokens without drafting, if there are plain rounds."""
    plain = [sizes for sizes in usual if not sizes.passes]
    return plain[:1] * (runner.state.backlog + 1) if runner.drafter is not None else []


def _different_verify_passes(usual: list[Sizes]) -> list[Sizes]:
    """Some of these sizes, one for each verify graph: it depends on the rows, and on whether they are trees."""
    return list({(bool(sizes.passes), sizes.rows): sizes for sizes in usual}.values())


def _play(runner: GpuBatchRunner, script: Script, texts: Callable[[], list[Sequence]], shares: bool = False) -> None:
    """Decode new texts until the script ends. `shares`: as if prompts shared all verify passes."""
    runner.prefill.rehearses_sharing = shares
    try:
        started = True
        while script.left and started:  # texts that are too short for a round prepare nothing
            left = len(script.left)
            _play_texts(runner, script, texts())
            started = len(script.left) < left
    finally:
        runner.prefill.rehearses_sharing = False


def _play_texts(runner: GpuBatchRunner, script: Script, texts: list[Sequence]) -> None:
    """Decode these texts until the script ends, or one of them may end."""
    if not runner.fits({text: text.end for text in texts}):
        return
    try:
        runner.join(texts)
        runner.prefill_all()
        while script.left and all(text.end - len(text.tokens) > _most_tokens(runner) for text in texts):
            runner.round()
    finally:
        runner.leave(texts)


def _most_tokens(runner: GpuBatchRunner) -> int:
    """That a text may get until the host knows it."""
    return (MAX_FLIGHT + 1) * runner.state.pending


class Script(Budget):
    """Gives the sizes of a list, one after the other, instead of those of a budget."""

    def __init__(self, budget: Budget, sizes: list[Sizes]):
        self._budget, self.left = budget, list(reversed(sizes))
        self._last = sizes[-1]

    @property
    def largest(self) -> Sizes | None:
        return self._budget.largest

    def plan(self, sizes: Sizes) -> Plan | None:
        return self._budget.plan(sizes)

    def sizes(self, load: Load) -> Sizes:
        self._last = self.left.pop() if self.left else self._last
        return self._last
