"""Device work as CUDA graphs: captured when it first runs, replayed afterwards. On other devices it just runs."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

Key = tuple[object, ...]
MAX_CAPTURE_FAILURES = 3  # after these, no more graphs are captured
MAX_GRAPHS = 1024  # the least recently used ones are dropped
UNKNOWN_SECONDS = 0.05  # assumed of the first capture of a kind


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for captures on this device; torch's default is one stream for all devices."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class GraphCache:
    """CUDA graphs by key.

    Work must read and write buffers whose addresses do not change. It must neither wait for the device nor allocate
    anything that outlives it. The first run is eager, which also loads the kernels. A capture follows, which runs
    nothing. Later runs replay the graph.
    """

    def __init__(self, device: torch.device, enabled: bool = True):
        self.device = device
        self.enabled = enabled and device.type == "cuda"
        self._device_context: AbstractContextManager[object] = nullcontext()
        if device.type == "cuda":  # kernels run on the current device, not on that of their tensors
            self._device_context = torch.cuda.device(device)
        self.graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self.independent: set[object] = set()  # ids of buffers whose graphs `clear` keeps
        self.captures = 0  # failed ones included
        self.failures = 0
        self.last_failure = ""  # the reason of the last failed capture
        self._seconds: dict[object, float] = {}  # of the quickest capture by kind; others may have compiled kernels

    def run(self, key: Key, work: Callable[[], object]) -> None:
        """Run this work. Equal keys must mean the same work on the same buffers."""
        with self._device_context:
            graph = self.graphs.pop(key, None)
            if graph is not None:
                self.graphs[key] = graph  # now the most recently used one
                graph.replay()
                return
            start = time.perf_counter()
            work()
            if self.enabled:
                self.captures += 1
                self._capture(key, work)
                seconds = time.perf_counter() - start
                self._seconds[key[0]] = min(self._seconds.get(key[0], seconds), seconds)

    def missing_seconds(self, key: Key) -> float:
        """About how long the first run of this key takes, with its capture; 0 if it is captured."""
        if not self.enabled or key in self.graphs:
            return 0.0
        return self._seconds.get(key[0], UNKNOWN_SECONDS)

    def refresh(self, key: Key, work: Callable[[], object]) -> None:
        """The same for work that may run twice and returns its results in memory of the graph, not in fixed buffers."""
        fresh = self.enabled and key not in self.graphs
        self.run(key, work)
        with self._device_context:
            if fresh and key in self.graphs:
                self.graphs[key].replay()
            elif fresh:
                work()

    def forget(self, buffers_id: object) -> None:
        """Drop all graphs whose key contains this id."""
        self.wait()
        self.independent.discard(buffers_id)
        self.graphs = {key: graph for key, graph in self.graphs.items() if buffers_id not in key}

    def clear(self) -> None:
        """Drop all graphs, except for those of independent buffers."""
        self.wait()
        self.graphs = {key: graph for key, graph in self.graphs.items() if self.independent.intersection(key)}

    def wait(self) -> None:
        """Wait for all work on the current stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def require_capture(self, what: str, work: Callable[[], object]) -> None:
        """Capture this work on trial; if that fails, warn, and capture nothing from now on."""
        if not self.enabled:
            return
        with self._device_context:
            work()
            torch.cuda.synchronize(self.device)
            reason = capture_failure(torch.cuda.CUDAGraph(), work, self.device)
        if reason:
            self._disable(f"{what} cannot be captured as a CUDA graph: {reason}")

    def _capture(self, key: Key, work: Callable[[], object]) -> None:
        """Capture this work; if that fails, for example because it waits for the device, it keeps running eagerly."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        while len(self.graphs) >= MAX_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        memory = next(iter(self.graphs.values())).pool() if self.graphs else None  # a pool needs a living graph
        if reason := capture_failure(graph, work, self.device, memory):
            self.failures += 1
            self.last_failure = reason
            if self.failures >= MAX_CAPTURE_FAILURES:
                self._disable(reason)
        else:
            self.graphs[key] = graph

    def _disable(self, reason: str) -> None:
        """Capture no more graphs."""
        self.enabled, self.last_failure = False, reason
        warnings.warn(f"passes are launched kernel by kernel: {reason}", stacklevel=2)


def capture_failure(
    graph: torch.cuda.CUDAGraph, work: Callable[[], object], device: torch.device, memory: Any = None
) -> str:
    """Capture this work, which has run before; returns why that failed, or an empty string."""
    stream = torch.cuda.current_stream(device)
    collecting = gc.isenabled()
    gc.disable()  # collecting an old graph would free memory, which breaks the capture
    try:
        with torch.cuda.graph(graph, pool=memory, stream=_capture_stream(device)):
            work()
    except RuntimeError as error:
        torch.cuda.set_stream(stream)  # if the capture failed at its start, its stream is still current
        torch.cuda.synchronize(device)
        return str(error).partition("\n")[0] or type(error).__name__
    finally:
        if collecting:
            gc.enable()
    return ""
