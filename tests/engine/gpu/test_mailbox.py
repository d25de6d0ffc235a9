"""Waiting for results that the device publishes."""

from __future__ import annotations

import pytest
import torch

from windfall.engine.gpu import mailbox
from windfall.engine.gpu.mailbox import POLLS_PER_PATIENT_YIELD, POLLS_PER_YIELD, Mailbox
from windfall.engine.gpu.transfer import PackedBuffer


def test_other_threads_may_run_while_a_patient_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the result comes from such a thread, long before the host would look whether the device has failed."""
    results = Mailbox(PackedBuffer(torch.device("cpu"), values=(torch.long, (4,))), 3)
    yields: list[float] = []

    def sleep(seconds: float) -> None:
        yields.append(seconds)
        if len(yields) == 3:
            results.publish()

    monkeypatch.setattr(mailbox.time, "sleep", sleep)
    results.wait(results.expect(), patient=True)
    assert yields == [0, 0, 0] and POLLS_PER_PATIENT_YIELD * len(yields) < POLLS_PER_YIELD
    with pytest.raises(RuntimeError, match="the host waits for 2"):
        results.wait(results.expect())
    assert len(yields) == 3
