"""Keeps requests in flight on an engine, in batches or as a stream."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from windfall.bench.runner import Case
from windfall.bench.throughput.answers import Answer, Run, rounds_of
from windfall.bench.throughput.workload import BATCH, Cell
from windfall.engine.engine import Engine
from windfall.engine.request import Handle

Serve = Callable[[Sequence[Case], int], list[Answer]]  # cases, and the number of requests that are kept in flight


def run_cell(serve: Serve, cases: Sequence[Case], cell: Cell) -> Run:
    """Answer these cases, `cell.concurrency` at once.

    Batches follow each other, and count from the submission of the first request to the end of the last. A stream
    counts from the end of the N-th text to the end of the N-th text before the last one, for N requests at once: all
    this time N requests are in flight, and the ramps at both ends are left out. Rounds in which these texts end count
    as a whole: the first is left out, and the last one counts.
    """
    size = cell.concurrency
    if cell.arrivals == BATCH:
        batches = [serve(cases[start : start + size], size) for start in range(0, len(cases), size)]
        windows = [(min(a.submitted for a in own), max(a.ended for a in own)) for own in batches]
        return Run([answer for own in batches for answer in own], windows)
    answers = serve(cases, size)
    ends = sorted(answer.ended for answer in answers)
    rounds = [own[-1].time for own in rounds_of([answer.parts for answer in answers])]
    start, end = (next((last for last in rounds if last >= each), each) for each in (ends[size - 1], ends[-size - 1]))
    return Run(answers, [(start, end)])


def engine_server(engine: Engine, temperature: float) -> Serve:
    """Requests on an engine; the next one is submitted in the moment in which one ends."""

    def serve(cases: Sequence[Case], at_once: int) -> list[Answer]:
        waiting, done = deque(enumerate(cases)), SimpleQueue[tuple[int, float, Handle] | Exception]()
        handles: list[Handle] = []

        def submit() -> None:
            number, case = waiting.popleft()
            params = case.at(temperature)
            sampling: dict[str, Any] = {"temperature": temperature, "seed": params.seed, "eos": params.eos}
            started = time.perf_counter()
            handle = engine.submit(case.ids, max_new_tokens=params.max_new_tokens, **sampling)
            handles.append(handle)
            handle.add_done_callback(lambda own: ended(number, started, own))

        def ended(number: int, started: float, handle: Handle) -> None:
            try:
                if waiting:
                    submit()
            except Exception as error:
                done.put(error)
            done.put((number, started, handle))

        try:
            with engine.target.turn:  # no round begins before all have been submitted
                for _ in range(min(at_once, len(cases))):
                    submit()
            ends = [_checked(done.get()) for _ in cases]
        finally:
            waiting.clear()
            for handle in handles:
                handle.cancel()
        ends.sort(key=lambda end: end[0])
        return [Answer.of(handle, started) for _, started, handle in ends]  # not before: it delays the engine's thread

    return serve


def _checked(found: tuple[int, float, Handle] | Exception) -> tuple[int, float, Handle]:
    if isinstance(found, Exception):
        raise found
    if found[2].finish_reason is None:
        found[2].result()  # raises the error
    return found
