"""A backend that runs the real engine in a thread, which waits at each decision of the policy."""

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
from windfall.policies.base import TreePolicy
from windfall.policies.context import Context
from windfall.policies.papers.ltd import NOTHING, View
from windfall.policies.ranking import best_nodes
from windfall.train.rl.config import Config
from windfall.train.rl.rollout import Outcome, split_texts

if TYPE_CHECKING:
    from windfall.engine.engine import Engine

DRAFT, STOP, CLOSE = -1, -2, -3  # answers to the engine; others are the number of nodes to verify


class Message(NamedTuple):
    """A message of the engine's thread. After "grow" and "select" it waits for an answer."""

    kind: str  # "grow" or "select": a question about this tree; "step": a finished cycle; "end"; "error"
    tree: DraftTree | None = None
    length: int = 0
    step: Step | None = None
    error: BaseException | None = None


class Closed(Exception):
    """The backend was closed."""


@dataclass
class RemotePolicy(TreePolicy):
    """A beam whose decisions are made outside, by messages."""

    k: int = 10
    entropy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.messages: SimpleQueue[Message] = SimpleQueue()
        self.answers: SimpleQueue[int] = SimpleQueue()
        self.waited = 0.0  # seconds for answers in this cycle

    def fresh(self) -> RemotePolicy:
        return self  # its queues are in use

    def grow(self, tree: DraftTree, ctx: Context) -> Grow | None:
        if self._ask(Message("grow", tree, ctx.length)) != DRAFT:
            return None
        depth = tree.arrays.depth
        newest = np.arange(np.searchsorted(depth, depth[-1]), len(tree))
        return Grow(torch.from_numpy(best_nodes(tree, newest, self.k)), self.k, self.entropy)

    def select(self, tree: DraftTree, ctx: Context) -> Tensor:
        count = self._ask(Message("select", tree, ctx.length)) + 1
        return torch.from_numpy(best_nodes(tree, np.arange(len(tree)), count))

    def _ask(self, message: Message) -> int:
        started = time.perf_counter()
        self.messages.put(message)
        answer = self.answers.get()
        if answer == CLOSE:
            raise Closed
        self.waited += time.perf_counter() - started
        return answer

    def take_waited(self) -> float:
        """The seconds waited since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited


class Live:
    """A backend over an engine that decodes these prompts."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Any],
        *,
        k: int = 10,
        entropy: bool = False,
        seed: int | None = None,
        **sampling: Any,
    ):
        """With a seed, prompts come endlessly in random order, otherwise once each."""
        self._policy = RemotePolicy(k, entropy)
        self._engine, self._prompts, self._seed = engine, prompts, seed
        self._sampling = {**sampling, "seed": 0}  # a prompt always gets the same text
        self._message = Message("none")
        self._thread: Thread | None = None
        self.passes = 0
        self._last_seconds = 0.0  # of the last cycle
        self._size = 1

    def begin(self) -> bool:
        if self._thread is None:
            self._thread = Thread(target=self._run, daemon=True)
            self._thread.start()
        self._receive()
        self.passes, self._size = 0, 1
        return self._message.kind != "end"

    def draft(self) -> bool:
        if self._message.kind != "grow":
            return False
        self._policy.answers.put(DRAFT)
        self._receive()
        if self._message.kind == "grow":  # the engine drafts no further where there is no room
            self.passes += 1
        before, self._size = self._size, len(self._tree)
        return self._size > before

    def view(self, newest: bool) -> View:
        tree = self._tree
        depth = int(tree.depth[-1])
        start = int(np.searchsorted(tree.depth.numpy(), depth)) if newest else 1
        entropy = NOTHING
        if self._policy.entropy:
            measured = ~tree.entropy.isnan()
            entropy = tree.entropy[measured & (tree.depth == depth - 1) if newest else measured].numpy()
        return View(tree.score.numpy()[max(start, 1) :], self._message.length, depth, entropy)

    def verify(self, nodes: int, decision_seconds: float) -> Outcome:
        if self._message.kind == "grow":
            self._policy.answers.put(STOP)
            self._receive()
        self._policy.answers.put(nodes)
        self._receive()
        step = self._message.step
        assert step is not None
        seconds = step.seconds.total - self._policy.take_waited()
        if step.recorded and self._last_seconds:
            seconds = min(seconds, self._last_seconds)  # without the time of capturing CUDA graphs
        else:
            self._last_seconds = seconds
        return Outcome(len(step.tokens), seconds + decision_seconds, self.passes, len(step.tree) - 1)

    def close(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self._policy.answers.put(CLOSE)
            try:
                self._thread.join(timeout=10)
            except KeyboardInterrupt:  # wait once more: a thread inside a forward pass would crash the process
                self._thread.join(timeout=10)
                raise
        self._thread = None

    @property
    def _tree(self) -> DraftTree:
        assert self._message.tree is not None
        return self._message.tree

    def _receive(self) -> None:
        self._message = self._policy.messages.get()
        if self._message.error is not None:
            raise self._message.error

    def _run(self) -> None:
        policy, self._engine.policy = self._engine.policy, self._policy
        try:
            for prompt in self._order():
                for step in self._engine.stream(prompt, **self._sampling):
                    self._policy.messages.put(Message("step", step=step))
            self._policy.messages.put(Message("end"))
        except Closed:
            pass
        except BaseException as error:
            self._policy.messages.put(Message("error", error=error))
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


class LiveSource:
    """Cycles of a real engine, timed as they run."""

    environments = 1

    def __init__(self, engine: Engine, prompts: Sequence[Any], config: Config, **sampling: Any):
        self.decision_seconds: float | None = None if config.decision_ms is None else config.decision_ms / 1000
        self.about = {"target": engine.target.name, "sampling": sampling}
        self._engine, self._prompts = engine, split_texts(list(prompts))
        self._options: dict[str, Any] = {"k": config.k, "entropy": "E" in config.parts, **sampling}

    def training_backend(self, seed: int) -> Live:
        return Live(self._engine, self._prompts["train"], seed=seed, **self._options)

    def evaluation_backend(self, split: str) -> Live:
        return Live(self._engine, self._prompts[split], **self._options)
