"""Bulk generation produces the engine's texts, independently of the batch."""

from __future__ import annotations

from collections import deque
from functools import cache

import pytest
import torch
from torch import Tensor

from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.sampling import gumbel, mix, signed
from windfall.core.types import InputError
from windfall.engine.engine import Engine
from windfall.model.target import Target
from windfall.train import slot_cache
from windfall.train.bulk import BulkGenerator, DecodeState, Request, sample, token_hashes

PROMPTS = [prompt(length, seed=length) for length in (1, 2, 9, 33, 40, 17, 5)]


@cache
def target(family: str = "llama", eos: int | None = None) -> Target:
    return Target(tiny(family, num_hidden_layers=2, eos_token_id=eos))


def requests(temperature: float = 0.0, max_new_tokens: int = 8) -> deque[Request]:
    return deque(Request(i, tokens, max_new_tokens + i, temperature, i) for i, tokens in enumerate(PROMPTS))


@cache
def engine_texts(temperature: float, family: str = "llama", eos: int | None = None) -> dict[int, list[int]]:
    engine = Engine(target(family, eos), registry.drafter("ngram"), registry.policy("none"))
    return {
        each.key: engine.generate(
            each.prompt, max_new_tokens=each.max_new_tokens, temperature=temperature, seed=each.seed
        ).token_ids
        for each in requests()
    }


def generated(generator: BulkGenerator, queue: deque[Request]) -> dict[int, list[int]]:
    return {completion.request.key: completion.tokens for completion in generator.run(queue)}


def reference(query: Tensor, key: Tensor, value: Tensor, bounds: slot_cache.Bounds, scale: float | None) -> Tensor:
    """The flash kernel's result, computed sequence by sequence."""
    mixed, group = torch.empty_like(query), query.shape[1] // key.shape[1]
    for i in range(len(bounds.queries) - 1):
        rows, start = slice(bounds.queries[i], bounds.queries[i + 1]), int(bounds.keys[i])
        size = int(bounds.keys[i + 1]) - start if bounds.used is None else int(bounds.used[i])
        own = (x[start : start + size].repeat_interleave(group, 1).transpose(0, 1)[None] for x in (key, value))
        states = torch.nn.functional.scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None], *own, is_causal=bounds.causal, scale=scale
        )
        mixed[rows] = states[0].transpose(0, 1)
    return mixed


@pytest.mark.parametrize(
    ("family", "temperature"),
    [("llama", 0.0), ("llama", 1.0), ("qwen3", 1.0), ("gpt2", 0.0), ("phi", 1.0), ("mixtral", 0.0)],
)
def test_bulk_texts_equal_the_engines(family: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_cache, "flash", reference)
    for packed in (False, True):
        generator = BulkGenerator(target(family), batch=3, capacity=60)
        generator.packed = packed
        assert generated(generator, requests(temperature)) == engine_texts(temperature, family)
        assert target(family).model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("batch", [1, 7, 16])
def test_a_completion_does_not_depend_on_the_batch(batch: int) -> None:
    assert generated(BulkGenerator(target(), batch, capacity=60), requests(1.0)) == engine_texts(1.0)


def test_several_steps_per_launch_give_the_same_texts() -> None:
    """As on a GPU: several steps between two reads, and the next ones launched before the read."""
    wanted = engine_texts(1.0, eos=7)
    generator = BulkGenerator(target(eos=7), batch=3, capacity=60)
    generator.steps, generator.lag, generator.min_refill = 8, 1, 2
    generator.state = DecodeState(3, generator.steps, generator.device)
    assert generated(generator, requests(1.0)) == wanted
    assert any(text[-1] == 7 for text in wanted.values())


def test_completions_end_at_stop_tokens_or_capacity() -> None:
    generator = BulkGenerator(target(), batch=3, capacity=48)
    free = {each.request.key: each for each in generator.run(requests(max_new_tokens=100))}
    assert all(len(c.request.prompt) + len(c.tokens) == 48 and c.finish == "length" for c in free.values())
    stop = free[2].tokens[3]
    ended = {each.request.key: each for each in generator.run(requests(max_new_tokens=100), eos=(stop,))}
    for key, completion in ended.items():
        tokens = free[key].tokens
        cut = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert completion.tokens == tokens[:cut] and completion.finish == ("stop" if stop in tokens else "length")
    assert ended[2].finish == "stop"


def test_requests_are_taken_in_order_and_may_be_added_later() -> None:
    generator = BulkGenerator(target(), batch=1, capacity=64)
    queue = deque([Request("first", PROMPTS[2], 3), Request("second", PROMPTS[1], 3)])
    order = []
    for completion in generator.run(queue):
        order.append(completion.request.key)
        if completion.request.key == "first":
            queue.appendleft(Request("between", PROMPTS[4], 3))
    assert order == ["first", "between", "second"]


def test_an_abandoned_run_does_not_affect_the_next() -> None:
    generator = BulkGenerator(target(), batch=3, capacity=60)
    next(generator.run(requests(1.0)))
    assert generated(generator, requests()) == engine_texts(0.0)


def test_unsupported_models_and_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="sliding windows"):
        BulkGenerator(Target(tiny("mistral-window")), 2, 32)
    with pytest.raises(InputError, match="1 to 31 tokens, not 33"):
        list(BulkGenerator(target(), 2, capacity=32).run(requests()))


def test_samples_use_the_samplers_noise() -> None:
    logits, positions = torch.randn(5, 61), torch.tensor([3, 0, 9, 9, 200])
    seeds, temperatures = [1, 2, 3, -4, 2**62], torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0])
    hashed = mix(torch.tensor([signed(seed) for seed in seeds]))
    drawn = sample(logits, hashed, positions, temperatures, token_hashes(61, logits.device))
    for row, (seed, temperature) in enumerate(zip(seeds, temperatures.tolist(), strict=True)):
        noise = gumbel(seed, positions[row : row + 1], torch.arange(61))[0]
        scores = logits[row] / temperature + noise if temperature else logits[row]
        assert drawn[row] == scores.argmax()


def test_a_temperature_near_zero_is_greedy() -> None:
    logits, rows = torch.randn(2, 7, generator=torch.Generator().manual_seed(0)), torch.arange(2)
    found = sample(logits, rows, rows, torch.tensor([1e-44, 0.0]), token_hashes(7, torch.device("cpu")))
    assert torch.equal(found, logits.argmax(-1))
