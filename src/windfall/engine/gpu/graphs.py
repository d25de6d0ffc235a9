"""Work that is launched as one CUDA graph from its second time on; on other devices it simply runs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

Key = tuple[object, ...]
MAX_CAPTURE_FAILURES = 3  # failures to record
MAX_GRAPHS = 1024  # graphs kept, those used last


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where work on this device is recorded; torch's own default is one for all devices."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class GraphCache:
    """Remembers device work by key.

    What is recorded must read and write buffers that stay in their place, and must neither allocate anything that
    outlives it nor wait for the device. The first time it runs as written, which also loads its kernels; then it is
    recorded, which runs nothing; afterwards it is replayed.
    """

    def __init__(self, device: torch.device, enabled: bool = True):
        self.device = device
        self.enabled = enabled and device.type == "cuda"
        self._device_context: AbstractContextManager[object] = nullcontext()
        if device.type == "cuda":  # kernels are launched on the current device, which need not be that of their tensors
            self._device_context = torch.cuda.device(device)
        self.graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self.captures = 0  # tried
        self.failures = 0
        self.last_failure = ""  # why the last work that could not be recorded could not

    def run(self, key: Key, work: Callable[[], object]) -> None:
        """Do this work; the same key always means the same work on the same buffers."""
        with self._device_context:
            graph = self.graphs.pop(key, None)
            if graph is not None:
                self.graphs[key] = graph  # as the one used last
                graph.replay()
                return
            work()
            if self.enabled:
                self.captures += 1
                self._capture(key, work)

    def refresh(self, key: Key, work: Callable[[], object]) -> None:
        """The same for work that may run twice and whose results are its own: they are those of the recorded run."""
        fresh = self.enabled and key not in self.graphs
        self.run(key, work)
        with self._device_context:
            if fresh and key in self.graphs:
                self.graphs[key].replay()
            elif fresh:
                work()

    def forget(self, name: object) -> None:
        """Drop what was recorded under keys with this name in them."""
        self.wait()
        self.graphs = {key: graph for key, graph in self.graphs.items() if name not in key}

    def clear(self) -> None:
        """Drop everything that was recorded."""
        self.wait()
        self.graphs.clear()

    def wait(self) -> None:
        """For the work under way, on the stream that it is launched on."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _capture(self, key: Key, work: Callable[[], object]) -> None:
        """Record it; what cannot be recorded (it waits for the device, say) runs as written from now on."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        while len(self.graphs) >= MAX_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        memory = (
            next(iter(self.graphs.values())).pool() if self.graphs else None
        )  # that of no living graph is last_failure
        stream = torch.cuda.current_stream(self.device)
        collecting = gc.isenabled()
        gc.disable()  # an old graph that is collected now would free memory, which ends the recording
        try:
            with torch.cuda.graph(graph, pool=memory, stream=_capture_stream(self.device)):
                work()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # where recording could not even begin, it is still the recording's
            self._note_failure(str(error).partition("\n")[0])
        else:
            self.graphs[key] = graph
        finally:
            if collecting:
                gc.enable()

    def _note_failure(self, reason: str) -> None:
        """Give up for good after a few failures: some may be bad luck."""
        self.failures += 1
        self.last_failure = reason
        torch.cuda.synchronize(self.device)
        if self.failures >= MAX_CAPTURE_FAILURES:
            self.enabled = False
            warnings.warn(f"passes are launched kernel by kernel: {reason}", stacklevel=2)
