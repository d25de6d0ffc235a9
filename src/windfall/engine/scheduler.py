"""The scheduler: decides between two rounds which requests run.

The queue is first in, first out, and no request overtakes another. A preempted request goes back to the head of the
queue, so those that run are always the oldest. The last one that runs is never preempted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequenced

from windfall.core.errors import RoomError
from windfall.core.types import Step
from windfall.core.wording import counted
from windfall.engine.batch_runner import BatchRunner, Outcome
from windfall.engine.counters import FAILED, Counters
from windfall.engine.handle import CANCELLED, DEADLINE
from windfall.engine.request import Request
from windfall.engine.sequence import Sequence

PREFILL_TOKENS = 4096  # of new requests between two rounds, which the running ones wait for; the last may have more
ADMISSION_TOKENS = 64  # that all requests must have room for, so that a new one is not preempted at once


class Scheduler:
    """A queue of requests. The oldest ones run together, as many as fit into the runner's memory.

    `submit` may be called by any thread, everything else by one thread at a time.
    """

    def __init__(
        self,
        runner: BatchRunner,
        max_requests: int,
        counters: Counters | None = None,
        round_calls: Sequenced[Callable[[], None]] = (),
    ):
        """`max_requests`: the largest number of requests that run together. `round_calls` are called after a round."""
        self.runner, self.max_requests, self.counters = runner, max_requests, counters or Counters()
        self._round_calls = round_calls
        self._queue: deque[Request] = deque()
        self._running: list[Request] = []  # the oldest first
        self._joining: list[Request] = []  # that left the queue and do not run yet
        self.error: Exception | None = None  # of the request that failed last
        self._lock = threading.Lock()  # of the queue

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue; raises a RoomError if it can never fit into the memory."""
        limit, end = self.runner.max_length, request.sequence.end
        if limit is not None and end > limit:
            raise RoomError(
                f"the request needs room for {counted(end, 'token')} ({request.prompt_tokens} of the prompt and "
                f"{end - request.prompt_tokens} new ones), but kv_memory holds {max(limit, 0)}; give more kv_memory, "
                "or ask for fewer max_new_tokens",
                max(limit - request.prompt_tokens, 0),
            )
        with self._lock:
            self._queue.append(request)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do; any thread may ask."""
        with self._lock:
            return not (self._queue or self._joining or self._running)

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """The number of requests that run or are being prefilled."""
        return len(self._running) + len(self._joining)

    def step(self) -> None:
        """One round: end requests that were cancelled or are late, preempt, admit, decode, and deliver the Steps."""
        self._end_early()
        self._preempt()
        self._admit()
        if self._running:
            self._round()

    def suspend(self) -> None:
        """Put all running requests back at the head of the queue; they go on with the next step."""
        self.runner.leave([request.sequence for request in self._running])
        self._requeue(self._running)
        self._running = []

    def close(self, error: Exception | None = None) -> None:
        """End all requests, as cancelled or with this error."""
        with self._lock:
            left, self._queue = [*self._running, *self._queue], deque()
        running, self._running = self._running, []
        for request in left:
            if error is None:
                self._end(request, CANCELLED)
            else:
                self._fail(request, error)
        self.runner.leave([request.sequence for request in running])

    def _end(self, request: Request, reason: str) -> None:
        self.counters.add_end(request, reason)
        request.end(reason)

    def _fail(self, request: Request, error: Exception) -> None:
        self.error = error
        self.counters.add_end(request, FAILED)
        request.fail(error)

    def _requeue(self, requests: list[Request]) -> None:
        with self._lock:
            self._queue.extendleft(reversed(requests))

    def _end_early(self) -> None:
        """End the requests that were cancelled or whose deadline has passed."""
        now = time.perf_counter()
        with self._lock:
            late = over(self._running, now) + over(self._queue, now)
            if not late:
                return
            leaving = set(late)
            self._queue = deque(request for request in self._queue if request not in leaving)
        self._drop([request for request in self._running if request in leaving])
        for request in late:
            self._end(request, CANCELLED if request.cancelled else DEADLINE)

    def _drop(self, requests: list[Request]) -> None:
        """Take these out of the running ones."""
        if not requests:
            return
        self.runner.leave([request.sequence for request in requests])
        leaving = set(requests)
        self._running = [request for request in self._running if request not in leaving]

    def _preempt(self) -> None:
        """While the running requests do not fit into the memory, the newest goes back to the head of the queue."""
        if self.runner.has_room:
            return
        while len(self._running) > 1 and not self.runner.fits(lengths(self._running)):
            newest = self._running[-1:]
            self.counters.preemptions += 1
            self._drop(newest)
            self._requeue(newest)

    def _admit(self) -> None:
        """Let the oldest requests of the queue join, as far as there is room."""
        if not self._queue or len(self._running) >= self.max_requests:
            return
        new: list[Request] = []
        needed, prefilled = lengths(self._running, ADMISSION_TOKENS), 0
        with self._lock:
            while self._queue and prefilled < PREFILL_TOKENS:
                needed |= lengths([self._queue[0]], ADMISSION_TOKENS)
                if not self._has_room(needed):
                    break
                new.append(self._queue.popleft())
                prefilled += len(new[-1].sequence.tokens)
            self._joining = new
        if new and not self._join(new):
            for request in new:  # one of them fails
                self._join([request])
        self._joining = []

    def _has_room(self, needed: dict[Sequence, int]) -> bool:
        """Whether sequences of these lengths can run together; one alone always can."""
        return len(needed) == 1 or (len(needed) <= self.max_requests and self.runner.fits(needed))

    def _join(self, requests: list[Request]) -> bool:
        """Prefill these requests; False if several failed together. One that fails alone ends with its error."""
        try:
            self.runner.join([request.sequence for request in requests])
        except Exception as error:
            if len(requests) > 1:
                return False
            self._fail(requests[0], error)
            return True
        self._running += requests
        return True

    def _round(self) -> None:
        outcomes: dict[Sequence, Outcome]
        try:
            outcomes = self.runner.round()
        except Exception as error:
            outcomes = {request.sequence: error for request in self._running}
        steps: list[tuple[Request, Step]] = []
        failed: list[tuple[Request, Exception]] = []
        for request in self._running:
            outcome = outcomes.get(request.sequence)
            if isinstance(outcome, Step):
                steps.append((request, outcome))
            elif outcome is not None:
                failed.append((request, outcome))
        counts = [step.counts for _, step in steps]  # before any request leaves: an error then reaches all of them
        self._drop([request for request, _ in failed] + [request for request, step in steps if step.finish])
        now = time.perf_counter()
        self.counters.add_round(steps, counts, self.runner.use, now)
        for request, reason in failed:
            self._fail(request, reason)
        for request, step in steps:
            request.put(step, now)
        for call in self._round_calls:
            call()


def over(requests: Iterable[Request], now: float) -> list[Request]:
    """Those that must not go on: they were cancelled, or their deadline has passed."""
    return [each for each in requests if each.cancelled or (each.expires is not None and now >= each.expires)]


def lengths(requests: Iterable[Request], more: int = 0) -> dict[Sequence, int]:
    """The tokens of each sequence so far, and up to `more` of those to come."""
    sequences = [request.sequence for request in requests]
    return {each: min(len(each.tokens) + more, max(each.end, len(each.tokens))) for each in sequences}
