from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from helpers.trees import random_tree
from windfall.core.sampling import GOLDEN, Sampler, gumbel, mix, noise_bits, process, warp
from windfall.core.tree import DraftTree
from windfall.core.types import InputError, SamplingParams


def test_hash_is_splitmix64() -> None:
    """The published outputs of the generator for seed 0."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    steps = torch.arange(1, 5) * GOLDEN
    assert [bits % 2**64 for bits in mix(steps).tolist()] == published


def test_noise_known_answers() -> None:
    """These numbers must never change: a change would alter every sampled text."""
    bits = noise_bits(1234, torch.tensor([0, 7]), torch.tensor([0, 1, 49151]))
    assert [[b % 2**64 for b in row] for row in bits.tolist()] == KNOWN_BITS
    noise = gumbel(1234, torch.tensor([7]), torch.tensor([0, 1, 49151]))[0]
    assert noise.tolist() == pytest.approx(KNOWN_GUMBEL, abs=1e-6)


KNOWN_BITS = [
    [1877665708317513960, 11148077257134347768, 11083344979068218828],
    [15036979306346895752, 14361947026687780069, 15837464276869692582],
]
KNOWN_GUMBEL = [1.587796688079834, 1.385072112083435, 1.8805277347564697]


def test_noise_depends_on_nothing_else() -> None:
    rows = gumbel(5, torch.tensor([3, 4, 9]), torch.arange(50))
    alone = gumbel(5, torch.tensor([9]), torch.tensor([17, 2]))
    assert torch.equal(rows[2, [17, 2]], alone[0])
    assert not torch.equal(gumbel(6, torch.tensor([9]), torch.tensor([17, 2])), alone)


def test_noise_is_uniform() -> None:
    """Chi-square of the hashed bits' top and low bytes over positions and tokens, one test for each byte."""
    bits = noise_bits(42, torch.arange(256), torch.arange(512)).flatten()
    for shift in range(0, 64, 8):
        counts = torch.bincount((bits >> shift) & 255, minlength=256).double()
        expected = len(bits) / 256
        chi = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi - 255) < 5 * math.sqrt(2 * 255), (shift, chi)


@pytest.mark.parametrize("what", ["token", "position", "seed"])
def test_noise_is_independent(what: str) -> None:
    """Neighbours in token, position and seed are uncorrelated, in value and in square."""
    size = 200_000
    if what == "token":
        noise = gumbel(1, torch.tensor([0]), torch.arange(size + 1))[0]
        a, b = noise[:-1], noise[1:]
    elif what == "position":
        noise = gumbel(1, torch.arange(size + 1), torch.tensor([0]))[:, 0]
        a, b = noise[:-1], noise[1:]
    else:
        a, b = (gumbel(seed, torch.tensor([0]), torch.arange(size))[0] for seed in (1, 2))
    for x, y in ((a, b), (a**2, b**2)):
        correlation = float(torch.corrcoef(torch.stack([x, y]))[0, 1])
        assert abs(correlation) < 5 / math.sqrt(size)


def test_gumbel_moments() -> None:
    noise = gumbel(3, torch.arange(64), torch.arange(8192)).double()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert bool(torch.isfinite(noise).all())


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    tree, wanted, counts = DraftTree.root(0), torch.softmax(logits / 0.8, -1), torch.zeros(5)
    for seed in range(1600):
        sampler = Sampler(SamplingParams(temperature=0.8, seed=seed), 1)
        counts[sampler.draws(tree, logits[None], [0])(0)] += 1
    assert float((counts / 1600 - wanted).abs().max()) < 0.04
    assert counts[4] == 0


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.0, "top_k": 5}, [TopKLogitsWarper(5)]),
        ({"temperature": 1.3, "top_p": 0.8}, [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.8)]),
        ({"temperature": 1.0, "min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"temperature": 1.0, "repetition_penalty": 1.4}, [RepetitionPenaltyLogitsProcessor(1.4)]),
        (
            {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 0.8},
            [
                RepetitionPenaltyLogitsProcessor(0.8),
                TemperatureLogitsWarper(0.9),
                TopKLogitsWarper(20),
                TopPLogitsWarper(0.9),
                MinPLogitsWarper(0.02),
            ],
        ),
    ],
)
def test_same_distribution_as_transformers(params: dict, warpers: list) -> None:
    torch.manual_seed(0)
    logits, prefix = 3 * torch.randn(6, 40), torch.randint(40, (6, 10))
    ours = process(logits, prefix, 4, SamplingParams(**params)).softmax(-1)
    theirs = LogitsProcessorList(warpers)(prefix, logits).softmax(-1)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_penalties_count_the_output_alone() -> None:
    logits, prefix = torch.zeros(1, 6), torch.tensor([[1, 1, 2, 2, 2, 3]])
    out = process(logits, prefix, 3, SamplingParams(presence_penalty=0.5, frequency_penalty=0.25))
    assert out[0].tolist() == pytest.approx([0, 0, -(0.5 + 2 * 0.25), -(0.5 + 0.25), 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_penalties_of_a_growing_text(dtype: torch.dtype) -> None:
    """Each node of a tree is penalised by its own path; the counts of the text are kept from cycle to cycle."""
    torch.manual_seed(0)
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    params = SamplingParams(temperature=1.0, seed=3, **penalties)
    sampler, committed = Sampler(params, 4), torch.randint(20, (5,)).tolist()
    for cycle in range(3):
        tree, logits = random_tree(9, cycle, width=20), torch.randn(9, 20).to(dtype)
        counts = sampler._counts_before(tree, committed, torch.arange(9), logits)
        found = process(logits, None, 4, params, counts=counts)
        for node in range(9):
            prefix = committed + tree.tokens[tree.path(node)[1:]].tolist()
            assert torch.equal(process(logits[[node]], torch.tensor([prefix]), 4, params)[0], found[node])
        committed += torch.randint(20, (cycle + 1,)).tolist()


def test_bias_and_greedy() -> None:
    sampler = Sampler(SamplingParams(logit_bias={3: 100.0}), 1)
    assert sampler.draws(DraftTree.root(0), torch.zeros(1, 6), [0])(0) == 3


def test_processor_sees_each_nodes_own_prefix() -> None:
    seen = []

    def spy(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(prefix.tolist())
        return scores

    tree = DraftTree.root(9).extend(torch.tensor([0, 0]), torch.tensor([5, 6]), torch.zeros(2), torch.tensor([0, 1]))
    tree = tree.extend(torch.tensor([2]), torch.tensor([7]), torch.zeros(1), torch.tensor([0]))
    draw = Sampler(SamplingParams(processors=(spy,)), 2).draws(tree, torch.zeros(4, 10), [8, 9])
    for node in (0, 2, 3):
        draw(node)
    assert seen == [[[8, 9]], [[8, 9, 6]], [[8, 9, 6, 7]]]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"repetition_penalty": 0.0},
        {"stop": ("",)},
    ],
)
def test_bad_params(bad: dict) -> None:
    with pytest.raises(InputError) as error:
        SamplingParams(**bad)
    assert next(iter(bad)).split("_")[0] in str(error.value)
    assert "\n" not in str(error.value)


def test_the_likeliest_token_always_stays() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    kept = warp(logits, SamplingParams(temperature=1.0, top_p=1e-320)).isfinite()
    assert torch.equal(kept, torch.zeros_like(kept).scatter(1, logits.argmax(1, keepdim=True), True))
