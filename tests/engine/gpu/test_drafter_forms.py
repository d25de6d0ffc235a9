"""Drafters that the package does not know run in fixed buffers if their `gpu_form` says how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from helpers.gpu import LENGTH, PRECISE, same_trees
from helpers.random_heads import random_head
from helpers.tiny import prompt, tiny
from windfall import Drafter, registry
from windfall.core.sampling import Dice
from windfall.core.tree import DraftTree
from windfall.core.types import GpuOptions, Grow
from windfall.drafters.base import GpuForm, HeadForm, ModelForm
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine, Generation
from windfall.kernels.eight_bits import EightBitWeight
from windfall.model.target import Target


@dataclass
class TwoLayerDrafter(LMDrafter):
    """A subclass that brings its own model."""

    def attach(self, target: Target) -> None:
        self._serve(tiny("llama", seed=1, dtype=PRECISE, num_hidden_layers=2), target)


@dataclass
class HeadSubclass(FeatureHeadDrafter):
    """A subclass without a method of its own."""


@dataclass
class Wrapper(Drafter):
    """A drafter that inherits nothing from the built-in ones: it passes all calls on to one."""

    inner: Any = None
    form: str = "own"  # own, none

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    def attach(self, target: Target) -> None:
        self.inner.attach(target)

    def start(self, prompts: list[list[int]], hidden: list[Tensor] | None, dice: Sequence[Dice | None]) -> None:
        self.inner.start(prompts, hidden, dice)

    def expand(self, trees: list[DraftTree], grows: Sequence[Grow | None]) -> list[DraftTree]:
        return self.inner.expand(trees, grows)

    def commit(
        self, trees: list[DraftTree], paths: list[Tensor], bonus: list[int], hidden: list[Tensor] | None
    ) -> None:
        self.inner.commit(trees, paths, bonus, hidden)

    def retain(self, keep: list[int]) -> None:
        self.inner.retain(keep)

    def gpu_form(self) -> GpuForm | str:
        if self.form == "none":
            return super().gpu_form()
        if isinstance(self.inner, LMDrafter):
            return ModelForm(self.inner.decoder, self.inner.vocabulary)
        return HeadForm(self.inner.head)


def small_model() -> LMDrafter:
    return LMDrafter(tiny("llama", seed=1, dtype=PRECISE, num_hidden_layers=2))


DRAFTERS = {
    "model subclass": TwoLayerDrafter,
    "head subclass": lambda: HeadSubclass(random_head("eagle3")),
    "model wrapper": lambda: Wrapper(small_model()),
    "head wrapper": lambda: Wrapper(FeatureHeadDrafter(random_head("eagle3"))),
}


def generate(drafter: Drafter, policy: str, graphs: bool, **settings: Any) -> tuple[Generation, Engine]:
    target = Target(tiny("llama", dtype=PRECISE))
    engine = Engine(target, drafter, registry.policy(policy, **settings), gpu_options=GpuOptions(graphs))
    return engine.generate(prompt(), max_new_tokens=LENGTH, eos=()), engine


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_from_outside_runs_in_fixed_buffers(name: str) -> None:
    settings = {"depth": 4, "k": 4, "nodes": 12}
    wanted, _ = generate(DRAFTERS[name](), "beam", False, **settings)
    found, engine = generate(DRAFTERS[name](), "beam", True, **settings)
    assert engine.fallback == "" and found.token_ids == wanted.token_ids
    same_trees(wanted, found, 4)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_from_outside_runs_in_graphs_for_a_policy_on_the_host(name: str) -> None:
    settings = {"arms": "beam:depth=4:k=4:nodes=12"}
    wanted, _ = generate(DRAFTERS[name](), "bandit", False, **settings)
    found, engine = generate(DRAFTERS[name](), "bandit", True, **settings)
    assert engine.fallback == "its policy decides on the host" and found.token_ids == wanted.token_ids
    assert engine.gpu_runner is not None and engine.gpu_runner.drafter_form is not None


def test_a_drafter_without_a_form_drafts_on_the_host() -> None:
    wanted, _ = generate(small_model(), "beam", False)
    found, engine = generate(Wrapper(small_model(), "none"), "beam", True)
    assert engine.fallback == "its drafter works on the host" and found.token_ids == wanted.token_ids


def test_a_head_may_read_its_weights_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text stays the same; only what is drafted may change."""
    monkeypatch.setattr("windfall.kernels.eight_bits.MIN_NUMBERS", 1)
    monkeypatch.setattr("windfall.heads.packed.in_precision", lambda head, wanted: head)  # that is for a CPU
    read: set[int] = set()
    product = EightBitWeight.__call__
    monkeypatch.setattr(EightBitWeight, "__call__", lambda own, *given: (read.add(id(own)), product(own, *given))[1])
    settings = {"depth": 4, "k": 4, "nodes": 12}
    wanted, _ = generate(FeatureHeadDrafter(random_head("eagle3")), "beam", True, **settings)
    assert not read
    found, engine = generate(FeatureHeadDrafter(random_head("eagle3"), weights="int8"), "beam", True, **settings)
    assert engine.fallback == "" and found.token_ids == wanted.token_ids
    assert len(read) == 6  # projections of features, attention (2), MLP (2) and the vocabulary
    texts = engine.generate_batch([prompt(), prompt(5)], max_new_tokens=LENGTH, eos=())
    assert engine.batch_fallback == "" and texts[0].token_ids == wanted.token_ids
    assert len(read) == 12
