"""States by layer boundary: the last one is the input of the final norm, in every form in which a model runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.random_heads import random_head
from helpers.tiny import FAMILIES, features_of, prompt, tiny
from windfall.core.errors import InputError
from windfall.core.types import GpuOptions
from windfall.engine.gpu.graphs import GraphCache
from windfall.engine.gpu.model_guard import ModelGuard
from windfall.engine.gpu.target import GpuTarget
from windfall.heads import formats
from windfall.heads.fitting import fit
from windfall.model.hidden_states import with_states
from windfall.model.target import Target
from windfall.train.batch import Batch
from windfall.train.teacher import Teacher

TAPS = (3, 1, -1, 0)  # of three layers


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_are_boundaries_on_the_host(family: str) -> None:
    model, tokens = tiny(family), prompt(10)
    [found] = Target(model).prefill([[*tokens, 1]], TAPS)
    torch.testing.assert_close(found, features_of(model, tokens, TAPS)[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-neox", "gemma", "gpt2"])
def test_taps_are_boundaries_on_fixed_buffers(family: str) -> None:
    """Models with Llama's architecture, and others."""
    model, tokens = tiny(family), prompt(10)
    wanted = features_of(model, tokens, TAPS)[0]
    gpu_target = GpuTarget(model, TAPS, GraphCache(torch.device("cpu")), GpuOptions(True))
    [found] = gpu_target.prefill(torch.tensor(tokens))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_taps_are_boundaries_in_training(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny(), torch.tensor([prompt(10)])
    wanted, final = (features_of(model, tokens[0].tolist(), taps) for taps in (TAPS, (-1,)))
    teacher = Teacher(model, TAPS)
    if compiled:
        usual = torch.nn.Module.compile
        monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: usual(self, backend="eager", **how))
        teacher.compile()
    for _ in range(2):
        outputs = teacher.run(Batch(tokens, torch.ones_like(tokens, dtype=torch.bool)))
        torch.testing.assert_close(outputs.features, wanted, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(outputs.final, final, atol=1e-5, rtol=1e-4)


def test_a_compiled_model_hands_out_the_same_states() -> None:
    model, tokens = tiny("gpt-neox"), prompt(10)
    wanted = features_of(model, tokens, TAPS)
    call = torch.compile(model, backend="eager", dynamic=False)
    for _ in range(3):
        _, found = with_states(call, model, TAPS, input_ids=torch.tensor([tokens]))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_negative_layer_numbers_count_from_the_end() -> None:
    model, tokens = tiny(), prompt(10)
    [found] = Target(model).prefill([[*tokens, 1]], (-2, -4))
    torch.testing.assert_close(found, features_of(model, tokens, (2, 0))[0])


def test_the_hook_does_not_count_as_a_change_of_the_model() -> None:
    """Captured graphs of the model stay valid, and its fused forward still supports it."""
    model = tiny()
    guard = ModelGuard(model)
    Target(model).prefill([prompt(5)], (3,))
    assert not guard.changed
    assert GpuTarget(model, (3,), GraphCache(torch.device("cpu")), GpuOptions(True)).inexact_reason == ""


class Hidden(torch.nn.Module):
    """A last layer that gives something else than it should."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor, **more: Any) -> torch.Tensor:
        found: torch.Tensor = self.inner(hidden_states, **more)
        return found[None]


def test_a_model_that_hides_the_state_is_refused_by_name() -> None:
    model = tiny("gpt-neox")
    layers = model.gpt_neox.layers
    layers[-1] = Hidden(layers[-1])
    head = random_head()
    target = Target.__new__(Target)  # its trees could not be scored either
    target.name, target.model, target.tokenizer = "odd", model, None
    target.decoder = Target(tiny("gpt-neox")).decoder
    with pytest.raises(InputError, match="before the final norm of odd: GPTNeoXForCausalLM does not show"):
        fit(head, target)


@pytest.mark.parametrize("format", ["eagle3", "speculators"])
def test_a_head_on_the_last_boundary_keeps_its_numbers(tmp_path: Path, format: str) -> None:
    target = Target(tiny())
    formats.write(fit(random_head(taps=(1, 2, 3)), target), tmp_path, format)
    assert formats.read(tmp_path, target.decoder.config).config.taps == (1, 2, 3)
