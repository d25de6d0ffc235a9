"""Copies between host and device that do not wait for each other."""

from __future__ import annotations

import time

import pytest
import torch

from windfall.engine.gpu.transfer import QUEUED_COPIES, QueuedBuffer, place

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BUSY_CYCLES = 200_000_000  # of the device: about a tenth of a second


def test_arrays_may_change_while_the_device_is_busy() -> None:
    device = torch.device("cuda")
    made, sends = QueuedBuffer(device, x=(torch.long, (4,))), 3 * QUEUED_COPIES
    seen = torch.zeros(sends, 4, dtype=torch.long, device=device)
    for start in range(0, sends, QUEUED_COPIES):
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)
        began = time.perf_counter()
        for number in range(start, start + QUEUED_COPIES):
            made.wait_writable()["x"][:] = number
            made.send()
            seen[number] = made.device["x"]
        assert time.perf_counter() - began < 0.03  # it did not wait
    assert seen.tolist() == [[number] * 4 for number in range(sends)]


def test_numbers_are_placed_while_the_device_is_busy() -> None:
    device = torch.device("cuda")
    place([1], device)
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    began = time.perf_counter()
    found = [place([number, number + 1], device) for number in range(20)]
    assert time.perf_counter() - began < 0.03
    assert [each.tolist() for each in found] == [[number, number + 1] for number in range(20)]
