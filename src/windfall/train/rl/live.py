"""Cycles of the real engine, one decision at a time: it runs in its own thread and waits where a policy is asked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from windfall.core.tree import DraftTree
from windfall.core.types import Grow, Step
from windfall.policies.base import TreePolicy, best_of
from windfall.policies.context import Context
from windfall.policies.papers.ltd import NOTHING, View
from windfall.train.rl.backend import Outcome

if TYPE_CHECKING:
    from windfall.engine.engine import Engine

DRAFT, STOP, CLOSE = -1, -2, -3  # what the engine is told; otherwise how many nodes to verify


class Report(NamedTuple):
    """What the engine says: it waits for an answer, unless this is the end of a cycle or of everything."""

    kind: str  # "grow" or "select": a question about this tree; "step": a finished cycle; "end"; "error"
    tree: DraftTree | None = None
    length: int = 0
    step: Step | None = None
    error: BaseException | None = None


class Closed(Exception):
    """Nobody asks for cycles any more."""


@dataclass
class Steered(TreePolicy):
    """A beam that asks outside for every decision."""

    k: int = 10
    entropy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.said: SimpleQueue[Report] = SimpleQueue()
        self.told: SimpleQueue[int] = SimpleQueue()
        self.waited = 0.0  # seconds for answers in this cycle

    def fresh(self) -> Steered:
        return self  # the two ends of its queues stay where they are

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        if self._ask(Report("grow", tree, ctx.length)) != DRAFT:
            return None
        depth = tree.arrays.depth
        newest = np.arange(np.searchsorted(depth, depth[-1]), len(tree))
        return Grow(torch.from_numpy(best_of(tree, newest, self.k)), self.k, self.entropy)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        count = self._ask(Report("select", tree, ctx.length)) + 1
        return torch.from_numpy(best_of(tree, np.arange(len(tree)), count))

    def _ask(self, report: Report) -> int:
        started = time.perf_counter()
        self.said.put(report)
        answer = self.told.get()
        if answer == CLOSE:
            raise Closed
        self.waited += time.perf_counter() - started
        return answer


class Live:
    """A backend over an engine that decodes these prompts."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Any],
        *,
        k: int = 10,
        entropy: bool = False,
        raw: bool = False,
        seed: int | None = None,
        **sampling: Any,
    ):
        """With a seed prompts come in random order and without end, else once each."""
        self._steered = Steered(k, entropy)
        self._engine, self._prompts, self._seed = engine, prompts, seed
        self._sampling = {**sampling, "raw": raw, "seed": 0}  # a prompt has the same text each time it comes
        self._state = Report("none")
        self._thread: Thread | None = None
        self.passes = 0
        self._taken = 0.0  # seconds of the last cycle
        self._size = 1

    def begin(self) -> bool:
        if self._thread is None:
            self._thread = Thread(target=self._work, daemon=True)
            self._thread.start()
        self._hear()
        self.passes, self._size = 0, 1
        return self._state.kind != "end"

    def draft(self) -> bool:
        if self._state.kind != "grow":
            return False
        self._steered.told.put(DRAFT)
        self._hear()
        if self._state.kind == "grow":  # it was done; where there is no room for more, the engine refuses
            self.passes += 1
        before, self._size = self._size, len(self._tree)
        return self._size > before

    def view(self, newest: bool) -> View:
        tree = self._tree
        depth = int(tree.depth[-1])
        start = int(np.searchsorted(tree.depth.numpy(), depth)) if newest else 1
        entropy = NOTHING
        if self._steered.entropy:
            measured = ~tree.entropy.isnan()
            entropy = tree.entropy[measured & (tree.depth == depth - 1) if newest else measured].numpy()
        return View(tree.score.numpy()[max(start, 1) :], self._state.length, depth, entropy)

    def verify(self, nodes: int, thinking: float) -> Outcome:
        if self._state.kind == "grow":
            self._steered.told.put(STOP)
            self._hear()
        self._steered.told.put(nodes)
        self._hear()
        step = self._state.step
        assert step is not None
        waited, self._steered.waited = self._steered.waited, 0.0
        taken = step.seconds.total - waited
        if step.recorded and self._taken:
            taken = min(taken, self._taken)  # some of it was done for the first time: it counts as the one before
        else:
            self._taken = taken
        return Outcome(len(step.tokens), taken + thinking, self.passes, len(step.tree) - 1)

    def close(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._steered.told.put(CLOSE)
            try:
                self._thread.join(timeout=10)
            except KeyboardInterrupt:  # once more: a thread in the midst of a pass would end the process badly
                self._thread.join(timeout=10)
                raise
        self._thread = None

    @property
    def _tree(self) -> DraftTree:
        assert self._state.tree is not None
        return self._state.tree

    def _hear(self) -> None:
        self._state = self._steered.said.get()
        if self._state.error is not None:
            raise self._state.error

    def _work(self) -> None:
        policy, self._engine.policy = self._engine.policy, self._steered
        try:
            for prompt in self._order():
                for step in self._engine.stream(prompt, **self._sampling):
                    self._steered.said.put(Report("step", step=step))
            self._steered.said.put(Report("end"))
        except Closed:
            pass
        except BaseException as error:
            self._steered.said.put(Report("error", error=error))
        finally:
            self._engine.policy = policy

    def _order(self) -> Iterator[Any]:
        if self._seed is None:
            yield from self._prompts
            return
        random = np.random.default_rng(self._seed)
        while True:
            for place in random.permutation(len(self._prompts)):
                yield self._prompts[place]
