"""Engines and requests for tests of the scheduler."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from torch import Tensor

from helpers.random_parallel import some_drafter
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import SamplingParams
from windfall.engine.engine import Engine
from windfall.engine.host_runner import TREE_ROWS, HostRunner
from windfall.engine.request import Handle, Request
from windfall.engine.scheduler import Scheduler
from windfall.engine.sequence import Sequence
from windfall.model.target import Target


class Gate:
    """A processor that lets the text go on when the gate is open."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, prefix: Tensor, scores: Tensor) -> Tensor:
        self.reached.set()
        assert self.open.wait(30)
        return scores


def held(made: Engine, number: int = 0) -> tuple[Gate, Handle]:
    """A request that waits at its first token, so that the engine is busy."""
    gate = Gate()
    handle = made.submit(prompt(9, number), processors=(gate,), max_new_tokens=12)
    assert gate.reached.wait(30)
    return gate, handle


@cache
def engine(drafter: str = "ngram") -> Engine:
    """An engine whose cycles are short."""
    target = Target(tiny(num_hidden_layers=3 if drafter in ("head", "block") else 2))  # heads read the third layer
    return Engine(target, some_drafter(drafter), registry.policy("beam", depth=2, k=2))


def memory(made: Engine, sequences: int, tokens: int) -> int:
    """Bytes for this number of sequences of this number of tokens."""
    return sequences * (tokens + TREE_ROWS) * (made.target.decoder.row_bytes + made.drafter.row_bytes)


def runner(made: Engine, bytes: int | None = None) -> HostRunner:
    return HostRunner(made.target, made.drafter, made.target.device, made.online_costs, memory=bytes)


def request(made: Engine, number: int, deadline: float | None = None, length: int = 9, **sampling: Any) -> Request:
    """A request for a random prompt of this length."""
    params = SamplingParams(**{"max_new_tokens": 12, **sampling})
    policy = made.policy.fresh()
    sequence = Sequence(prompt(length, number), params, policy, made.target, made.coupled, made.calibrators)
    return Request(number, sequence, deadline)


def tokens(done: Request) -> list[int]:
    """The tokens of a request so far."""
    return [token for step in done.steps for token in step.tokens]


def alone(made: Engine, number: int, length: int = 9, **sampling: Any) -> list[int]:
    """The tokens that plain generation gives for the prompt of `request`."""
    return made.generate(prompt(length, number), **{"max_new_tokens": 12, **sampling}).token_ids


def finish(scheduler: Scheduler, most: int = 1000) -> int:
    """Step until nothing is left; returns the number of steps."""
    for count in range(most):
        if scheduler.idle:
            return count
        scheduler.step()
    raise AssertionError("the scheduler does not end")
