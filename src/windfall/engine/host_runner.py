"""The sequences of the host loop: they join its KV caches and leave them between cycles.

New sequences are prefilled in a cache of their own, grouped by length, so that those that run are not padded to a long
prompt. With a drafter that cannot join, all sequences are started again. An error of a processor, a criterion or a stop
condition ends its sequence only. If a cycle fails earlier, for example in a policy, each sequence repeats it alone to
find the one that fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from windfall.core.clock import now
from windfall.core.types import Step
from windfall.costs.online import OnlineCosts
from windfall.drafters.base import Drafter
from windfall.engine.batch_runner import Outcome, Use
from windfall.engine.host_loop import HostLoop, LoopTarget
from windfall.engine.lockstep import Lockstep
from windfall.engine.sequence import Sequence
from windfall.model.target import Target

TREE_ROWS = 64  # of a sequence in a cycle, as `fits` counts them


class HostRunner:
    """A `BatchRunner` on the host loop."""

    def __init__(
        self,
        target: LoopTarget,
        drafter: Drafter,
        device: torch.device,
        online_costs: OnlineCosts,
        costs_are_of_gpu: bool = False,
        lockstep: Lockstep | None = None,
        memory: int | None = None,
    ):
        """`memory`: bytes for the KV caches of target and drafter, as `fits` counts them; None: no limit. For
        `costs_are_of_gpu` see HostLoop."""
        self.target, self.drafter, self.device, self.memory = target, drafter, device, memory
        self.loop = HostLoop(target, drafter, online_costs, costs_are_of_gpu, lockstep)
        self.live: dict[int, Sequence] = {}  # by the number of sequences that joined before, in the order of the caches
        self._joined = 0  # sequences so far
        self._prefill_seconds: dict[Sequence, float] = {}  # of sequences whose first cycle is to come

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
        started, running, self.loop.drafted_length = now(self.device), list(self.live.values()), 0
        for sequence in sequences:
            sequence.score_prompt()
        try:
            if running and self.drafter.can_join:
                prompts, dice = [list(each.tokens) for each in sequences], [each.dice for each in sequences]
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
            if self.loop.walked or self.loop.lockstep is not None:
                raise
            if len(self.live) == 1:
                return dict.fromkeys(self.live.values(), error)
            return self._round_one_by_one()

    def fits(self, lengths: Mapping[Sequence, int]) -> bool:
        """The caches are padded: each sequence takes as many rows as the longest, and those of its tree."""
        return self.memory is None or self._bytes(lengths.values()) <= self.memory

    @property
    def has_room(self) -> bool:
        return self.memory is None

    def _bytes(self, lengths: Collection[int]) -> int:
        return len(lengths) * (max(lengths, default=0) + TREE_ROWS) * self._row_bytes

    @property
    def max_length(self) -> int | None:
        """The number of tokens up to which a single sequence fits."""
        return None if self.memory is None else self.memory // self._row_bytes - TREE_ROWS

    @property
    def use(self) -> Use:
        """The share of the memory, as `fits` counts it, and the budget of the last round."""
        lengths = [len(sequence.tokens) for sequence in self.live.values()]
        return Use(None if self.memory is None else self._bytes(lengths) / self.memory, self.loop.budget)

    @property
    def _row_bytes(self) -> int:
        assert isinstance(self.target, Target)
        return self.target.decoder.row_bytes + self.drafter.row_bytes

    def _start(self, sequences: list[Sequence]) -> None:
        """Empty the caches, and prefill these sequences together."""
        prompts, taps = [list(sequence.tokens) for sequence in sequences], self.drafter.taps
        hidden = self.target.prefill(prompts, taps)
        if prompts or self.drafter.can_join:  # other drafters may not expect an empty list
            self.drafter.start(prompts, hidden, [sequence.dice for sequence in sequences])

    def _round(self) -> dict[Sequence, Outcome]:
        steps = dict(zip(self.live.values(), self.loop.cycle(self.live), strict=True))
        waits = self._prefill_seconds
        done = {
            sequence: _as_first(step, sequence, waits.pop(sequence)) if sequence in waits else step
            for sequence, step in steps.items()
        }
        return {**done, **self.loop.failed}

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
        self.live = {n: each for n, each in everyone.items() if not isinstance(outcomes.get(each), Exception)}
        self._start(list(self.live.values()))
        return outcomes


def _as_first(step: Step, sequence: Sequence, prefill_seconds: float) -> Step:
    """The first Step after a prefill."""
    return replace(step, prefill_seconds=prefill_seconds, prompt_logprobs=sequence.take_prompt_logprobs())


def raised(outcome: Outcome) -> Step:
    """The Step; an exception is raised."""
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
