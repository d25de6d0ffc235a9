"""In a training step the host never waits for the device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.pretend_device import HostWaitsError, PretendDevice
from helpers.stepping import Stepper, head_training, student_training
from helpers.texts import write_drawn_texts
from helpers.tiny import tiny
from windfall.model.target import Target
from windfall.train.block_memory import PackedBlocks
from windfall.train.objectives import OBJECTIVES, block

DPACE = "step_weights=dpace"


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny(num_hidden_layers=4))


@pytest.fixture(scope="module")
def texts(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drawn_texts(tmp_path_factory.mktemp("texts"), target)


@pytest.mark.parametrize("method", OBJECTIVES)
def test_of_every_method(method: str, texts: Path, target: Target, tmp_path: Path) -> None:
    check(head_training(texts, tmp_path, target, method))


@pytest.mark.parametrize("settings", [[], ["everywhere=true", "loss=coupled"]])
def test_of_a_small_model(settings: list[str], texts: Path, target: Target, tmp_path: Path) -> None:
    check(student_training(texts, tmp_path, target, settings=settings))


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("block", {"shape": {"vocabulary": 50}, "loss": "coupled:0.5,lk:0.5"}),
        ("block", {"shape": {"pair": "path"}, "settings": [DPACE]}),
        ("ttt", {"shape": {"vocabulary": 50}, "loss": "coupled", "settings": [DPACE]}),
        ("talf", {"settings": ["forced=true", "share=1"], "loss": "coupled"}),
        ("medusa", {"settings": ["hard=0.5", DPACE]}),
    ],
)
def test_of_settings(method: str, changes: dict[str, Any], texts: Path, target: Target, tmp_path: Path) -> None:
    check(head_training(texts, tmp_path, target, method, {"optimizer": "muon"}, **changes))


def test_of_the_attention_that_a_gpu_uses(
    texts: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(queries: Tensor, keys: Tensor, values: Tensor, **_: Any) -> Tensor:
        return queries + keys.mean() + values.mean()

    monkeypatch.setattr(block, "new_memory", PackedBlocks)
    monkeypatch.setattr("windfall.train.block_memory.flex_attention", attention)  # one kernel on a GPU
    check(head_training(texts, tmp_path, target, "block", shape={"bidirectional": True}))


def check(training: Stepper) -> None:
    device = PretendDevice(training.tensors())
    with device:
        figures = training.step()
    assert device.operators["mm"] > 20 and device.holds(next(training.trainer.head.parameters()))
    assert math.isfinite(figures.take()[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: bool(x.all()),
        lambda x: int(x.argmax()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.index_put_((x > 0,), torch.zeros((), device=x.device)),
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: torch.ones(3).to(x.device),
        lambda x: torch.ones(3, 4).T.to(x.device, non_blocking=True),
        lambda x: x + torch.ones(3),
        lambda x: x[torch.tensor([1])],
    ],
)
def test_the_pretended_device_sees_what_makes_the_host_wait(call: Any) -> None:
    x = torch.ones(3)
    with PretendDevice([x]), pytest.raises(HostWaitsError):
        call(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.ones(3).nonzero().tolist(),
        lambda x: x + torch.ones(3).to(x.device, non_blocking=True),
        lambda x: x + torch.arange(3, device=x.device) * 2.0,
        lambda x: torch.where(x > 0, x, 0)[x.argsort()],
        lambda x: x.requires_grad_().split(1)[0].sum().backward(),
    ],
)
def test_the_pretended_device_lets_the_host_work(call: Any) -> None:
    x = torch.ones(3)
    with PretendDevice([x]):
        call(x)
