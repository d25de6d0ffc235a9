"""Triton's launches on a CPU: every call of a kernel passes its checks of shapes and strides; nothing is launched."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import windfall.engine.gpu.batch
import windfall.kernels
from helpers.cli import character_tokenizer
from helpers.random_heads import random_head
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.model.target import Target

jit = pytest.importorskip("triton.runtime.jit")
SMALL = {"beam": {"depth": 3, "k": 3, "nodes": 10}}


class Launches:
    """Calls each kernel twice: first as Triton would be called, without a launch; then with torch."""

    def __init__(self) -> None:
        self.checking = False
        self.calls: Counter[str] = Counter()

    def on_triton(self, x: torch.Tensor) -> bool:
        return self.checking

    def twice(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.checking:
                return kernel(*args, **kwargs)
            self.checking = True
            try:
                kernel(*args, **kwargs)
                self.calls[kernel.__name__] += 1
            finally:
                self.checking = False
            found = kernel(*args, **kwargs)
            if type(found) is tuple:  # Triton's results are contiguous
                found = tuple(each.contiguous() if isinstance(each, torch.Tensor) else each for each in found)
            return found

        return call


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    made = Launches()
    monkeypatch.setattr(jit.JITFunction, "run", lambda *args, **kwargs: None)
    for package in (windfall.kernels, windfall.engine.gpu, windfall.engine.gpu.batch):
        for each in pkgutil.iter_modules(package.__path__):  # what is imported later would keep the changed kernels
            importlib.import_module(f"{package.__name__}.{each.name}")
    kernels = {
        value: made.twice(value)
        for name, module in list(sys.modules.items())
        if name.startswith("windfall.kernels.") and ".triton" not in name and not name.endswith(".backend")
        for value in vars(module).values()
        if inspect.isfunction(value) and value.__module__ == name and "on_triton(" in inspect.getsource(value)
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("windfall."):
            if name.startswith("windfall.kernels.") and hasattr(module, "on_triton"):
                monkeypatch.setattr(module, "on_triton", made.on_triton)
            for attribute, value in list(vars(module).items()):
                if inspect.isfunction(value) and value in kernels:
                    monkeypatch.setattr(module, attribute, kernels[value])
    return made


@pytest.mark.parametrize(("policy", "kind"), [("beam", "eagle3"), ("auto", "itself"), ("survival", "eagle3")])
def test_calls_of_kernels_pass_their_checks(launches: Launches, policy: str, kind: str) -> None:
    drafter = LMDrafter() if kind == "itself" else FeatureHeadDrafter(random_head(kind))
    target = Target(tiny("llama", dtype=torch.float32), character_tokenizer())
    options = GpuOptions(True, pages=True)
    found = Engine(target, drafter, registry.policy(policy, **SMALL.get(policy, {})), True, options, max_requests=4)
    for sampling in ({}, {"temperature": 0.8, "seed": 6, "top_p": 0.9}):
        asked: dict[str, Any] = {"max_new_tokens": 4, "eos": (), **sampling}
        found.generate_batch([prompt(3), prompt(66), prompt(20)], **asked)
    assert found.batch_fallback == "" and len(launches.calls) >= 15, launches.calls
