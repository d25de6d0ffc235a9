"""Block heads in fixed buffers: the same trees as on the host, for one text and for batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.gpu import engine, paths, plain_text, same_trees
from helpers.tiny import prompt
from windfall.engine.gpu.drafters import drafter_form
from windfall.engine.split_runner import SplitRunner

ON_GPU = ["block", "block-pruned", "block-plain", "block-dflash", "block-window"]
ON_GPU += ["block-path", "block-rnn", "block-gated", "block-conv", "block-markov", "block-scaled"]
WARM: dict[str, Any] = {"temperature": 1.0, "seed": 3}
LENGTH = 26
PROMPTS = [prompt(length, seed=length) for length in (9, 70, 14)]


@pytest.mark.parametrize(
    ("kind", "sampling"), [*((kind, {}) for kind in ON_GPU), *((kind, WARM) for kind in ON_GPU[:8])]
)
def test_the_device_drafts_the_same_trees(kind: str, sampling: dict[str, Any]) -> None:
    host, device = (engine("llama", kind, "beam", graphs) for graphs in (False, True))
    wanted, found = (each.generate(prompt(), max_new_tokens=LENGTH, eos=(), **sampling) for each in (host, device))
    assert device.gpu_runner is not None and not device.fallback
    assert wanted.token_ids == found.token_ids == plain_text("llama", LENGTH, **sampling)
    if sampling:  # later ones depend on kappa, which the device learns a cycle later
        assert [paths(text.steps[0].tree) for text in (wanted, found)] == [paths(wanted.steps[0].tree)] * 2
        torch.testing.assert_close(wanted.steps[0].drafted.logq, found.steps[0].drafted.logq, atol=1e-4, rtol=1e-4)
    else:
        same_trees(wanted, found, 8)


@pytest.mark.parametrize("policy", ["auto", "dynatree", "opt-tree"])
def test_other_policies_write_the_same_text(policy: str) -> None:
    device = engine("llama", "block", policy, True)
    for sampling in ({}, WARM):  # passes of both kinds are captured in turn
        found = device.generate(prompt(), max_new_tokens=LENGTH, eos=(), **sampling)
        assert found.token_ids == plain_text("llama", LENGTH, **sampling)


@pytest.mark.parametrize(
    ("kind", "policy"), [("block", "svip"), ("block", "disco"), ("block", "c2t"), ("block-path", "svip")]
)
def test_entropies_are_those_of_the_host(kind: str, policy: str) -> None:
    host, device = (engine("llama", kind, policy, graphs) for graphs in (False, True))
    wanted, found = (each.generate(prompt(), max_new_tokens=LENGTH, eos=()) for each in (host, device))
    same_trees(wanted, found, 8)
    wanted, found = (each.generate(prompt(), max_new_tokens=8, eos=(), **WARM) for each in (host, device))
    assert paths(wanted.steps[0].drafted) == paths(found.steps[0].drafted)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("block", "auto"),
        ("block-pruned", "beam"),
        ("block-dflash", "beam"),
        ("block-plain", "auto"),
        ("block-rnn", "beam"),
        ("block-path", "auto"),
    ],
)
def test_batches_write_the_same_texts(kind: str, policy: str) -> None:
    device, alone = (engine("llama", kind, each, graphs) for each, graphs in ((policy, True), ("none", False)))
    for sampling in ({}, WARM):
        wanted = [alone.generate(each, max_new_tokens=12, eos=(), **sampling).token_ids for each in PROMPTS]
        found = device.generate_batch(PROMPTS, max_new_tokens=12, eos=(), **sampling)
        assert [text.token_ids for text in found] == wanted
    runner = device._batch_runner()
    assert isinstance(runner, SplitRunner) and not device.batch_fallback


@pytest.mark.parametrize("kind", ["block", "block-window", "block-rnn", "block-path", "block-gated"])
def test_a_batch_drafts_the_trees_of_single_texts(kind: str) -> None:
    host, device = (engine("llama", kind, "beam", graphs) for graphs in (False, True))
    wanted = [host.generate(each, max_new_tokens=LENGTH, eos=()) for each in PROMPTS]
    for one, other in zip(wanted, device.generate_batch(PROMPTS, max_new_tokens=LENGTH, eos=()), strict=True):
        assert [step.tokens for step in one.steps][:-3] == [step.tokens for step in other.steps][: len(one.steps) - 3]


@pytest.mark.parametrize("kind", ["block-windows", "block-anchor-windows"])
def test_what_has_no_kernels_runs_on_the_host(kind: str) -> None:
    made = engine("llama", kind, "beam", True)
    found = made.generate(prompt(), max_new_tokens=8, eos=())
    assert found.token_ids == plain_text("llama")[:8] and "host" in made.fallback
    form = drafter_form(made.drafter, made.target.device)
    assert isinstance(form, str) and form.startswith("its drafter works on the host")
