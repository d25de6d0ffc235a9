"""A device may run work long after the host launched it. Here it runs as late as possible.

If the host reads a buffer before it waits, or overwrites one before it is copied, the texts differ. In the other tests
the work runs at once, which is the other extreme.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.gpu import LEARNING, ON_DEVICE, engine, paths
from helpers.tiny import prompt
from helpers.watching import policy as watching
from windfall import registry
from windfall.costs.acceptance import Calibrator
from windfall.engine.engine import Generation
from windfall.engine.gpu.cycle import Cycle, PassPredictor
from windfall.engine.gpu.events import DeviceEvent
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.mailbox import Mailbox
from windfall.engine.gpu.transfer import PackedBuffer

SHAPED: dict[str, dict[str, Any]] = {"static": {}, "sequoia": {"nodes": 16, "depth": 4}}


class Device:
    """Runs launched work in order: at once or, if it is late, when the host waits for it."""

    def __init__(self) -> None:
        self.asked: list[Callable[[], None]] = []
        self.done = 0
        self.late, self.at_once = False, True
        self.waits = 0

    def do(self, work: Callable[[], None]) -> None:
        work() if self.at_once else self.asked.append(work)

    def until(self, moment: int) -> None:
        self.waits += self.done < moment
        before, self.at_once = self.at_once, True
        while self.done < moment:
            self.asked[self.done]()
            self.done += 1
        self.at_once = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Replaces copies, CUDA graphs and events. Host and device get separate memory; prefill runs at once."""
    device = Device()

    def asked(owner: type, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *given: device.do(lambda: real(self, *given)))

    for owner, name in ((PackedBuffer, "send"), (PackedBuffer, "publish"), (Cycle, "limit_verified")):
        asked(owner, name)
    lay, start = PackedBuffer._allocate, Cycle.start

    def apart(self: PackedBuffer, there: torch.Tensor, *given: Any) -> None:
        lay(self, there, *given)
        self._host_bytes = torch.zeros_like(there)
        self.host = self.views(self._host_bytes)

    def begin(self: Cycle, text: list[int]) -> None:
        device.until(len(device.asked))
        device.at_once = True
        start(self, text)
        device.at_once = not device.late

    def note(self: DeviceEvent, stream: Any) -> DeviceEvent:
        self.moment = len(device.asked)  # type: ignore[attr-defined]
        return self

    def settled(self: PackedBuffer) -> dict[str, Any]:
        device.until(len(device.asked))
        return self.host

    monkeypatch.setattr(PackedBuffer, "_allocate", apart)
    monkeypatch.setattr(PackedBuffer, "wait_writable", settled)
    monkeypatch.setattr(Cycle, "start", begin)
    monkeypatch.setattr(DeviceEvent, "record", note)
    monkeypatch.setattr(DeviceEvent, "wait", lambda self: device.until(self.moment))
    monkeypatch.setattr(DeviceEvent, "done", lambda self: self.moment <= device.done)
    monkeypatch.setattr(Mailbox, "_yield_or_fail", lambda self, *given: device.until(device.done + 1))
    monkeypatch.setattr(GraphCache, "run", lambda self, key, work: device.do(work))
    return device


def texts(name: str, folder: Path) -> list[Generation]:
    """Three texts of one engine; the second one is left unfinished."""
    made = engine("llama", "eagle3", "beam", graphs=True, coupled=False)
    known = {**ON_DEVICE, **LEARNING, **SHAPED}
    made.policy = registry.policy(name, **known[name]) if name in known else watching(name, folder)
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 2}]
    first = made.generate(prompt(), max_new_tokens=8, eos=(), **ways[0])
    next(made.stream(prompt(7, seed=1), max_new_tokens=8, eos=(), **ways[1]))
    assert made.fallback == ""
    return [first, made.generate(prompt(9, seed=2), max_new_tokens=8, eos=(), **ways[1])]


@pytest.mark.parametrize(
    ("name", "early"),
    [
        *((name, False) for name in (*ON_DEVICE, *LEARNING, *SHAPED, "svip", "c2t", "ltd-entropies")),
        *((name, True) for name in ("ddd", "gt", "svip", "dynatree", "ltd-entropies")),
    ],
)
def test_nothing_is_touched_before_its_time(
    name: str, early: bool, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassPredictor, "likely", lambda self, level: early)
    monkeypatch.setattr(Calibrator, "update_speedup", lambda self, *given: None)  # which goes by the clock
    wanted = texts(name, tmp_path)
    device.late = True
    found = texts(name, tmp_path)
    assert device.waits > 8 and device.done < len(device.asked), "it was late, and is"
    for one, other in zip(wanted, found, strict=True):
        assert one.token_ids == other.token_ids
        assert [paths(step.drafted) for step in one.steps] == [paths(step.drafted) for step in other.steps]
        assert [paths(step.tree) for step in one.steps] == [paths(step.tree) for step in other.steps]
