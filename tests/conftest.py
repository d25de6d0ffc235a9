from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.testing

pytest_plugins = ["helpers.skips"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["WINDFALL_CONFIG"] = ""  # the user's own defaults are not for tests
torch.set_num_threads(1)  # tiny models: threads only get in each other's way
gc.set_threshold(50_000, 20, 20)  # tests make many objects, few of them in cycles, and torch's own are many
typer.testing._get_command = functools.cache(typer.testing._get_command)  # CliRunner builds all commands each time


@pytest.fixture(autouse=True, scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests measure and save is not the user's. Off a GPU a pass reads all of its buffer: here it is small."""
    patch = pytest.MonkeyPatch()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted or "windfall.engine" in sys.modules:  # kernels alone need no engine, whose import takes long
        if torch.cuda.is_available():
            patch.setattr("windfall.engine.memory.FREE_SHARE", 0.02)  # tests that run at the same time share a GPU
        else:
            patch.setattr("windfall.engine.gpu.target.INITIAL_CAPACITY_ROWS", 192)
            patch.setattr("windfall.engine.gpu.target.CAPACITY_STEP_ROWS", 64)
        for module in ("engine", "profiling", "check_records"):
            patch.setattr(f"windfall.engine.{module}.cache_dir", lambda: Path(os.environ.get("WINDFALL_CACHE", folder)))
        patch.setattr(
            "windfall.kernels.few_rows._faster_rows", lambda kernel: range(2, 65)
        )  # not what a busy machine measures
    if interpreted:  # programs run one after the other, those without work too
        for name in ("MAX_PROGRAMS", "MAX_PROGRAMS_SMALL"):
            patch.setattr(f"windfall.kernels.triton.path_attention.{name}", 12)
    patch.delenv("COLUMNS", raising=False)  # workers of pytest-xdist have it
    patch.setenv("WINDFALL_DATA", str(tmp_path_factory.mktemp("data")))
    folder = tmp_path_factory.mktemp("cache")
    yield
    patch.undo()


@pytest.fixture
def only_llama_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of all other families run with windfall's attention."""
    from windfall.engine.gpu import families

    monkeypatch.setattr(families, "FAMILIES", {"LlamaForCausalLM": families.FAMILIES["LlamaForCausalLM"]})


@pytest.fixture
def no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if models did not use transformers' attention interface."""

    from windfall.engine.gpu.forward import Unsupported

    def refuse(model: Any) -> Any:
        raise Unsupported("its attention is its own")

    monkeypatch.setattr("windfall.engine.gpu.target.InterfaceForward", refuse)


def pytest_runtest_teardown() -> None:
    """What a command has set aside for its process, which is ours here, is not for good."""
    gc.unfreeze()
