"""Batches on a GPU: in half precision, the texts are those of single requests, in any company."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from helpers.cli import character_tokenizer
from helpers.random_heads import random_block, random_head
from helpers.tiny import tiny
from windfall import registry
from windfall.core.types import GpuOptions
from windfall.drafters.block import BlockDrafter
from windfall.drafters.feature_head import FeatureHeadDrafter
from windfall.drafters.lm import LMDrafter
from windfall.engine.engine import Engine
from windfall.kernels.backend import triton_installed
from windfall.model.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not triton_installed(), reason="no CUDA device or no Triton"),
]
TOKENS = 40
SAMPLINGS = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "seed": 6, "top_p": 0.9}]
SHAPE = {"num_hidden_layers": 3, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 1024}
KV_MEMORY = "500MB"  # tests that run at the same time share the GPU


def made(family: str, policy: str, drafter: str = "itself", requests: int = 64) -> Engine:
    shape = SHAPE if drafter == "itself" else {"max_position_embeddings": 1024}  # that of random heads
    model = tiny(family, dtype=torch.bfloat16, **shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.div_(2)  # near-ties are what this is about
    target = Target(model.cuda(), character_tokenizer())
    own = LMDrafter() if drafter == "itself" else FeatureHeadDrafter(random_head(drafter))
    memory = {"max_requests": requests, "kv_memory": KV_MEMORY}
    return Engine(target, own, registry.policy(policy), True, GpuOptions(True, pages=True), **memory)


def prompts(count: int) -> list[list[int]]:
    chance = random.Random(1)
    return [[chance.randrange(1, 60) for _ in range(chance.choice([2, 9, 40, 64, 65, 200, 300]))] for _ in range(count)]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "seed": 6, "top_p": 0.9}]
)
@pytest.mark.parametrize("policy", ["none", "beam", "auto", "tetris", "survival"])
def test_texts_of_batches(policy: str, sampling: dict[str, Any]) -> None:
    engine, asked = made("llama", policy), {"max_new_tokens": TOKENS, "eos": (), **sampling}
    given = prompts(40)
    wanted = [engine.generate(each, **asked).token_ids for each in given]
    for size in (8, 40):
        for _ in range(2):  # the second time, beginnings are known
            found = [
                text.token_ids
                for start in range(0, len(given), size)
                for text in engine.generate_batch(given[start : start + size], **asked)
            ]
            assert found == wanted


HOST_REQUESTS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "penalties": {"frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {7: 2.0, 9: -3.0}},
    "policy": {"policy": registry.policy("svip")},
}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "random", "top-p"])
@pytest.mark.parametrize("kind", HOST_REQUESTS)
@pytest.mark.parametrize("drafter", ["itself", "eagle3"])
def test_requests_that_need_the_host(drafter: str, kind: str, sampling: dict[str, Any]) -> None:
    """They share verify passes with each other, and the KV cache with requests that do not need the host."""
    engine, asked = made("llama", "auto", drafter), {"max_new_tokens": TOKENS, "eos": (), **sampling}
    given, chance = prompts(30), random.Random(3)
    own = [HOST_REQUESTS[kind] if place % 4 else {} for place in range(len(given))]
    wanted = [engine.submit(each, **asked, **how).result(60) for each, how in zip(given, own, strict=True)]
    for _ in range(2):  # the second time, beginnings are known
        handles = []
        for each, how in zip(given, own, strict=True):
            handles.append(engine.submit(each, **asked, **how))
            torch.cuda._sleep(chance.randrange(1_000_000))
        found = [handle.result(120) for handle in handles]
        assert [text.token_ids for text in found] == [text.token_ids for text in wanted]
        assert [text.logprobs for text in found] == [text.logprobs for text in wanted]
    engine.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral-window", "mixtral", "olmo2", "starcoder2"])
def test_families(family: str) -> None:
    engine, asked = made(family, "beam"), {"max_new_tokens": TOKENS, "eos": ()}
    given = prompts(12)
    wanted = [engine.generate(each, **asked).token_ids for each in given]
    assert [text.token_ids for text in engine.generate_batch(given, **asked)] == wanted


def test_random_arrivals() -> None:
    engine, asked = made("llama", "auto"), {"max_new_tokens": TOKENS, "eos": ()}
    given, chance = prompts(60), random.Random(2)
    samplings: list[dict[str, Any]] = [{"temperature": chance.choice([0.0, 1.0]), "seed": n} for n in range(len(given))]
    wanted = [engine.generate(each, **asked, **own).token_ids for each, own in zip(given, samplings, strict=True)]
    handles = []
    for each, own in zip(given, samplings, strict=True):
        handles.append(engine.submit(each, **asked, **own))
        torch.cuda._sleep(chance.randrange(100_000))
    assert [handle.result(60).token_ids for handle in handles] == wanted
    engine.close()


@pytest.mark.parametrize("kind", ["block", "block-pruned", "block-dflash", "block-markov"])
@pytest.mark.parametrize("policy", ["beam", "auto"])
def test_block_heads(kind: str, policy: str) -> None:
    target = Target(tiny("llama", dtype=torch.bfloat16, max_position_embeddings=1024).cuda(), character_tokenizer())
    options = GpuOptions(True, pages=True)
    how = registry.policy(policy), True, options
    drafting = Engine(target, BlockDrafter(random_block(kind)), *how, kv_memory=KV_MEMORY)
    given = prompts(20)
    for sampling in SAMPLINGS:
        asked = {"max_new_tokens": TOKENS, "eos": (), **sampling}
        drafting.policy = registry.policy("none")
        wanted = [drafting.generate(each, **asked).token_ids for each in given]
        drafting.policy = registry.policy(policy)
        assert [drafting.generate(each, **asked).token_ids for each in given] == wanted
        assert policy == "auto" or not drafting.fallback  # auto may find that this drafter does not pay
        assert [text.token_ids for text in drafting.generate_batch(given, **asked)] == wanted
