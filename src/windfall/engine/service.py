"""Runs the requests of an engine: in a thread of its own, or in the caller's."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from windfall.core.options import is_number
from windfall.core.types import InputError
from windfall.engine.batch_runner import BatchRunner
from windfall.engine.counters import Counters
from windfall.engine.lost_device import is_lost
from windfall.engine.request import Request
from windfall.engine.scheduler import Scheduler
from windfall.model.decoder import tree_attention
from windfall.model.target import Target
from windfall.policies.base import TreePolicy

MAX_REQUESTS_CPU, MAX_REQUESTS_GPU = 8, 128  # that run together by default
TURN_SECONDS = 0.1  # between two looks at whether the thread runs
CLOSE_SECONDS = 60.0  # that `close` waits for the last round


class Service:
    """A scheduler and its thread, which starts with the first request and ends when no request is left.

    A round needs the target's turn, as every other generation does. If another generation used the target's KV cache
    since the last round, the requests that run are prefilled again.
    """

    def __init__(self, target: Target, max_requests: int | None = None):
        usual = MAX_REQUESTS_CPU if target.device.type == "cpu" else MAX_REQUESTS_GPU
        self.target, self.max_requests = target, checked_requests(max_requests) or usual
        self.counters = Counters()  # of all requests
        self._scheduler: Scheduler | None = None
        self._policy: TreePolicy | None = None  # that the scheduler's runner was made for
        self._thread: threading.Thread | None = None
        self.closed = False
        self.lost: Exception | None = None  # the error with which the device was lost
        self._when_lost: list[Callable[[], None]] = []
        self.round_calls: list[Callable[[], None]] = []  # made after each round, by the thread that generates
        self._text = -1  # the value of `target.texts` while the KV cache belongs to this scheduler
        self._lock = threading.Lock()  # of the thread's start and end

    @property
    def busy(self) -> bool:
        """Whether the thread runs and takes requests."""
        return self._thread is not None and not self.closed

    @property
    def running(self) -> int:
        """Submitted requests that run."""
        scheduler = self._scheduler
        return 0 if scheduler is None else scheduler.running

    @property
    def waiting(self) -> int:
        """Submitted requests that wait."""
        scheduler = self._scheduler
        return 0 if scheduler is None else scheduler.waiting

    def _new_scheduler(self, runner: BatchRunner) -> Scheduler:
        return Scheduler(runner, self.max_requests, self.counters, self.round_calls)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Wait for the target's turn, and hold it in this block. False: the thread runs, which must not be waited for;
        the caller should submit a request."""
        while not self.busy:
            if self.target.turn.acquire(timeout=TURN_SECONDS):
                try:
                    yield True
                finally:
                    self.target.turn.release()
                return
        yield False

    def submit(self, request: Request, make_runner: Callable[[], BatchRunner], policy: TreePolicy) -> None:
        """Queue a request for the thread.

        A new thread has a new runner. So has a thread without requests if `policy`, which is the engine's, has changed.
        """
        with self._lock:
            if self.closed:
                raise RuntimeError("this engine is closed")
            if self._scheduler is None or self._thread is None or (self._scheduler.idle and self._policy != policy):
                self._scheduler = None  # its runner's memory can be used again
                self._scheduler, self._policy = self._new_scheduler(make_runner()), policy
            self._scheduler.submit(request)
            if self._thread is None:
                _services.add(self)
                self._thread = threading.Thread(target=self._work, name="windfall-scheduler", daemon=True)
                self._thread.start()

    def run(self, requests: list[Request], make_runner: Callable[[], BatchRunner]) -> None:
        """Run these requests in this thread, until all have ended or the first has failed."""
        scheduler = self._new_scheduler(make_runner())
        with self.target.turn, tree_attention(self.target.model):
            self.target.texts += 1
            try:
                for request in requests:
                    scheduler.submit(request)
                while not scheduler.idle and not any(request.error for request in requests):
                    scheduler.step()
            finally:
                scheduler.close()

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call this, in any thread, when the device is lost: the process can then use it no more."""
        with self._lock:
            self._when_lost.append(call)
            lost = self.lost is not None
        if lost:
            call()

    def close(self) -> None:
        """Cancel all requests and end the thread; no more requests are taken."""
        with self._lock:
            self.closed, thread = True, self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            self._work_until_idle()
        except BaseException as error:  # for example SystemExit of a processor: the next request starts a new thread
            with self._lock:
                scheduler, self._thread, self._scheduler = self._scheduler, None, None
            if scheduler is not None:
                with self.target.turn, suppress(Exception):
                    scheduler.close(RuntimeError(f"the engine's thread has ended: {type(error).__name__}"))
            raise

    def _work_until_idle(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.set_device(self.target.device)
        while True:
            with self._lock:
                scheduler = self._scheduler
                if self.closed or scheduler is None or scheduler.idle:
                    self._thread = self._scheduler = None
                    break
            with self.target.turn, tree_attention(self.target.model):
                self._step(scheduler)
        if scheduler is not None and not scheduler.idle:
            with self.target.turn, suppress(*[Exception] if self.lost else []):
                scheduler.close()

    def _step(self, scheduler: Scheduler) -> None:
        scheduler.error = None
        try:
            if self._text != self.target.texts:
                scheduler.suspend()
                self.target.texts += 1
                self._text = self.target.texts
            scheduler.step()
        except Exception as error:  # of the runner itself: nothing is known about its state
            with self._lock:
                if self._scheduler is scheduler:
                    self._scheduler = None
            with suppress(Exception):
                scheduler.close(error)
            scheduler.error = error
        if scheduler.error is not None and is_lost(self.target.device, scheduler.error):
            self._lose(scheduler.error)

    def _lose(self, error: Exception) -> None:
        """End the thread and take no more requests: all would fail."""
        with self._lock:
            self.closed, self.lost, calls = True, error, [*self._when_lost]
        for call in calls:
            call()


def checked_requests(given: int | None) -> int | None:
    """`max_requests`, if it is a number of requests or None."""
    if given is not None and (not is_number(given, whole=True) or given < 1):
        raise InputError(f"max_requests must be a whole number of at least 1, not {given!r}")
    return given


_services: weakref.WeakSet[Service] = weakref.WeakSet()  # whose threads were started


@atexit.register
def _close_all() -> None:
    """End the threads before the interpreter does, which cannot stop a pass of a model cleanly."""
    for service in list(_services):
        service.close()
