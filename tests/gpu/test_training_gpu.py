"""Training steps on a CUDA device: the host never waits for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.stepping import head_training
from helpers.texts import write_drawn_texts
from helpers.tiny import tiny
from windfall.model.target import Target
from windfall.train.objectives import OBJECTIVES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WIDE: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.fixture
def waiting_fails() -> Iterator[None]:
    """While `torch.cuda.set_sync_debug_mode` is set by a test; it is put back after it."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("waiting_fails")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, {}) for method in OBJECTIVES),
        ("block", {"loss": "coupled:0.5,lk:0.5", "shape": {"vocabulary": 50}, "settings": ["step_weights=dpace"]}),
        ("ttt", {"loss": "coupled", "shape": {"vocabulary": 50}, "settings": ["step_weights=dpace"]}),
    ],
)
def test_the_host_never_waits(method: str, changes: dict[str, Any], optimizer: str, tmp_path: Path) -> None:
    target = Target(tiny(dtype=torch.bfloat16, head_dim=16, **WIDE).to("cuda"))
    texts = write_drawn_texts(tmp_path / "texts", Target(tiny(head_dim=16, **WIDE)))
    training = head_training(texts, tmp_path / "out", target, method, {"optimizer": optimizer}, **changes)
    training.step()  # compiled again for other sizes
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    figures = training.step()
    torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(figures.take()[0])
