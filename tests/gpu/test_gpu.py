"""The same numbers and the same texts on a CUDA device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from helpers.sampling import SAMPLING
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.bench.memory import held_by_graphs, peak_apart
from windfall.core.sampling import gumbel, noise_bits
from windfall.core.types import GpuOptions, SamplingParams
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.engine.gpu.timing import costs
from windfall.model.target import Target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_the_noise_is_the_same_on_both() -> None:
    positions, tokens = torch.arange(64), torch.arange(50_000)
    here, there = (noise_bits(99, positions.to(d), tokens.to(d)).cpu() for d in ("cpu", "cuda"))
    assert torch.equal(here, there)
    here, there = (gumbel(99, positions.to(d), tokens.to(d)).cpu() for d in ("cpu", "cuda"))
    assert torch.equal(here, there)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny().cuda())


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())
@pytest.mark.parametrize("policy", [p for p in registry.policies() if p != "none"])
def test_same_seed_gives_same_text(target: Target, policy: str, sampling: dict[str, Any]) -> None:
    plain = Engine(target, registry.drafter("ngram"), registry.policy("none"))
    wanted = plain.generate(prompt(), max_new_tokens=24, seed=0, **sampling).token_ids
    for drafter in (registry.drafter("ngram"), LMDrafter(model=tiny(seed=1, num_hidden_layers=1).cuda())):
        engine = Engine(target, drafter, registry.policy(policy))
        made = engine.generate(prompt(), max_new_tokens=24, seed=0, **sampling)
        assert made.token_ids == wanted


def test_cpu_and_gpu_write_the_same_text(target: Target) -> None:
    on_cpu = Engine(Target(tiny()), registry.drafter("lm"), registry.policy("beam"))
    on_gpu = Engine(target, registry.drafter("lm"), registry.policy("beam"))
    for temperature in (0.0, 1.0):
        how = {"max_new_tokens": 40, "temperature": temperature, "seed": 0}
        texts = [engine.generate(prompt(), **how).token_ids for engine in (on_cpu, on_gpu)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("policy", ["beam", "ltd", "svip", "salf"])
def test_capture_works_after_growth_and_measuring(policy: str) -> None:
    """Graphs of dropped buffers do not break later captures."""
    made = Engine(Target(tiny(max_position_embeddings=8192).cuda()), LMDrafter(), registry.policy(policy))
    wanted = made.generate(prompt(), max_new_tokens=24, eos=()).token_ids
    runner = made.gpu_runner
    assert runner is not None
    graph_cache, before = runner.gpu_target.graph_cache, runner.gpu_target.capacity
    made.generate(prompt(3000), max_new_tokens=24, eos=())
    assert runner.gpu_target.capacity > before and graph_cache.graphs
    costs(runner, lengths=(64, 512))
    assert made.generate(prompt(), max_new_tokens=24, eos=()).token_ids == wanted
    assert graph_cache.graphs and graph_cache.enabled and not graph_cache.failures


@pytest.mark.parametrize("policy", ["beam", "chain"])
def test_captured_drafts_see_the_whole_text(policy: str) -> None:
    """A drafter that is the target itself stays right while the bound on columns grows."""
    target = Target(tiny("gptj", max_position_embeddings=2048).cuda())
    host, made = (
        Engine(target, LMDrafter(), registry.policy(policy), gpu_options=GpuOptions(on)) for on in (False, True)
    )
    texts = [each.generate(prompt(200), max_new_tokens=700, eos=()) for each in (host, made)]
    assert texts[1].stats.tau > 0.9 * texts[0].stats.tau


def test_the_memory_of_a_method_alone_is_measured_without_a_trace(target: Target) -> None:
    """Graphs count, what others hold does not, and nothing stays behind."""
    params = SamplingParams(max_new_tokens=40, eos=())

    def make(policy: str, graphs: bool) -> Engine:
        return Engine(
            Target(target.model),
            LMDrafter(tiny(seed=1).cuda()),
            registry.policy(policy),
            gpu_options=GpuOptions(graphs),
        )

    peaks, left = [], []
    for policy, graphs in [("none", True), ("beam", True), ("beam", False)] * 2:
        peaks.append(peak_apart(target, partial(make, policy, graphs), prompt(), params))
        left.append((torch.cuda.memory_allocated(), held_by_graphs(target.device)))
    assert min(peaks) > sum(weight.nbytes for weight in target.model.parameters())
    assert peaks[:3] == pytest.approx(peaks[3:], rel=0.01)
    assert set(left[3:]) == {left[2]}
