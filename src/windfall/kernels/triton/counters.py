"""Counters by which the last program of a group to finish knows that it is the last.

A program raises its counter with an atomic that releases its results. The last one reads those of the others with
loads that bypass the L1 cache (".cg"), after the atomic and a barrier. It does not acquire: that would discard the L1
cache of the whole multiprocessor, on which other programs still work.
"""

from __future__ import annotations

import torch
from torch import Tensor

COUNTERS = 1 << 15  # groups of programs that one launch can count

_counters: dict[torch.device, Tensor] = {}


def counters(device: torch.device) -> Tensor | None:
    """Counters that are 0 between launches, for the kernels of the single stream that runs a model on this device.

    None if they do not exist yet while a graph is captured: they would not be 0 until the graph is replayed.
    """
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        _counters[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # once: any later stream then sees the zeros
    return _counters[device]
