"""The host loop as a batch runner: sequences join and leave between rounds, and no text changes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pytest
import torch

from helpers.random_parallel import some_drafter
from helpers.scheduling import alone, engine, memory, request, runner, tokens
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import Step
from windfall.drafters.base import Drafter
from windfall.drafters.lm import LMDrafter
from windfall.drafters.ngram import NGramDrafter
from windfall.engine.batch_runner import BatchRunner
from windfall.engine.engine import Engine
from windfall.engine.host_runner import HostRunner
from windfall.engine.request import Request
from windfall.model.decoder import estimated_numbers_per_row, similar_lengths
from windfall.model.kv_cache import GROWTH_ROWS, KVCache
from windfall.model.target import Target

DRAFTERS = [*registry.drafters(), "small"]
SAMPLINGS = ({}, {"temperature": 0.9, "seed": 5})
LENGTHS = (9, 60, 1, 25, 2, 40)  # of prompts; 40 and 60 are caught up by drafters before the first draft pass


def play(loop: HostRunner, requests: list[Request], seed: int) -> None:
    """Run these requests; each joins, and sometimes leaves and joins again, after a random number of rounds."""
    chance, waiting, inside = random.Random(seed), list(requests), list[Request]()
    while waiting or inside:
        if waiting and (not inside or chance.random() < 0.4):
            new = [waiting.pop(0) for _ in range(min(len(waiting), chance.randint(1, 2)))]
            loop.join([each.sequence for each in new])
            inside += new
        outcomes = loop.round()
        for each in inside:
            outcome = outcomes[each.sequence]
            assert isinstance(outcome, Step), outcome
            each.put(outcome, perf_counter())
        leaving = [each for each in inside if each.done or chance.random() < 0.1]
        loop.leave([each.sequence for each in leaving])
        inside = [each for each in inside if each not in leaving]
        waiting += [each for each in leaving if not each.done]
        check_caches(loop)


def check_caches(loop: HostRunner) -> None:
    """The caches hold the committed tokens of the sequences that run, and nothing else."""
    cache = loop.target.decoder.cache
    cache.check()
    assert cache.lengths == [len(sequence.tokens) - 1 for sequence in loop.live.values()]
    if isinstance(loop.drafter, LMDrafter):
        held = zip(loop.drafter.decoder.lengths, loop.drafter._pending, strict=True)
        assert [length + len(own) for length, own in held] == [len(each.tokens) for each in loop.live.values()]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_text_is_the_same_alone_and_with_random_company(drafter: str) -> None:
    made = engine(drafter)
    for seed, sampling in enumerate(SAMPLINGS):
        requests = [request(made, i, length=length, **sampling) for i, length in enumerate(LENGTHS)]
        play(runner(made), requests, seed)
        for i, each in enumerate(requests):
            assert tokens(each) == alone(made, i, length=LENGTHS[i], **sampling), (drafter, i)


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "mistral-window"])
def test_windows_and_learned_positions(family: str) -> None:
    made = Engine(Target(tiny(family)), some_drafter("self"), registry.policy("beam", depth=2, k=2))
    requests = [request(made, i, length=length) for i, length in enumerate(LENGTHS)]
    play(runner(made), requests, 3)
    assert [tokens(each) for each in requests] == [alone(made, i, length=n) for i, n in enumerate(LENGTHS)]


def test_running_sequences_take_no_part_in_the_prefill_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made, sizes = engine("small"), list[tuple[int, ...]]()
    loop = runner(made)
    loop.join([request(made, 0).sequence, request(made, 1).sequence])
    loop.round()
    for decoder in (made.target.decoder, made.drafter.decoder):
        forward = decoder.model.base_model.forward

        def counted(*given: Any, forward: Any = forward, **named: Any) -> Any:
            sizes.append(tuple(named["input_ids"].shape))
            return forward(*given, **named)

        monkeypatch.setattr(decoder.model.base_model, "forward", counted)
    loop.join([request(made, 2, length=100).sequence])
    loop.round()
    assert sizes.count((1, 99)) == 2  # the prompt, once in the target and once in the drafter
    assert all(rows < 32 for batch, rows in sizes if batch > 1)


def test_prompts_of_very_different_lengths_are_not_padded_to_the_longest() -> None:
    lists = [[1] * size for size in (0, 3, 700, 128, 129, 1000, 0, 200)]
    assert similar_lengths(lists) == [[1, 3], [2, 5], [4, 7]]
    made = engine()
    sizes = (9, 200, 140, 1, 100)
    requests = [request(made, i, length=size) for i, size in enumerate(sizes)]
    play(runner(made), requests, 4)
    assert [tokens(each) for each in requests] == [alone(made, i, length=n) for i, n in enumerate(sizes)]


# ---- drafters of other packages


@dataclass
class OnlyStart(Drafter):
    """A drafter without `join`, which needs hidden states."""

    starts: int = 0
    taps = (1,)

    def start(self, prompts: list[list[int]], hidden: Any, dice: Any) -> None:
        assert [len(own) for own in hidden] == [len(own) - 1 for own in prompts] and prompts
        self.starts += 1
        self.inner = NGramDrafter(min_match=1)
        self.inner.start(prompts, None, dice)

    def expand(self, trees: Any, grows: Any) -> Any:
        return self.inner.expand(trees, grows)

    def begin(self, tokens: list[int]) -> Any:
        return self.inner.begin(tokens)

    def commit(self, trees: Any, paths: Any, bonus: Any, hidden: Any) -> None:
        assert len(hidden) == len(trees)
        self.inner.commit(trees, paths, bonus, None)

    def retain(self, keep: list[int]) -> None:
        assert keep
        self.inner.retain(keep)


class Counting(NGramDrafter):
    """It has state of its own that the inherited `join` does not know."""

    def start(self, prompts: Any, hidden: Any, dice: Any) -> None:
        super().start(prompts, hidden, dice)
        self.count = len(prompts)


def test_a_drafter_without_join_is_started_again() -> None:
    made = Engine(engine().target, OnlyStart(), registry.policy("beam", depth=2, k=2))
    assert not made.drafter.can_join
    requests = [request(made, i, length=length) for i, length in enumerate(LENGTHS)]
    play(runner(made), requests, 1)
    assert made.drafter.starts > 2
    assert [tokens(each) for each in requests] == [alone(made, i, length=n) for i, n in enumerate(LENGTHS)]


def test_join_must_belong_to_the_class_of_start() -> None:
    assert all(some_drafter(name).can_join for name in DRAFTERS)
    assert not Counting().can_join and not OnlyStart().can_join


# ---- failures


class Failing:
    """A processor, or a criterion, that raises after this many calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, prefix: torch.Tensor, scores: torch.Tensor | None) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyError("mine")
        return False if scores is None else scores


class Bad(registry.policy_class("beam")):  # type: ignore[misc]
    """A policy that raises when the text has 15 tokens."""

    def grow(self, tree: Any, ctx: Any) -> Any:
        if ctx.length >= 15:
            raise ZeroDivisionError("mine")
        return super().grow(tree, ctx)


@pytest.mark.parametrize("drafter", ["ngram", "small", "head"])
@pytest.mark.parametrize("kind", ["processor", "policy", "criterion"])
def test_a_sequence_that_raises_fails_alone(drafter: str, kind: str) -> None:
    made = engine(drafter)
    how = {"processor": {"processors": (Failing(6),)}, "criterion": {"criteria": (Failing(4),)}}.get(kind, {})
    stateful = Failing(100)
    others = {0: {}, 2: {"processors": (stateful,)}}
    requests = [request(made, 0), request(made, 1, **how), request(made, 2, **others[2])]
    if kind == "policy":
        requests[1].sequence.policy = Bad(depth=2, k=2)
    loop, failed = runner(made), list[Exception]()
    loop.join([each.sequence for each in requests])
    left = list(requests)
    while left:
        outcomes = loop.round()
        assert set(outcomes) == {each.sequence for each in left}
        for each in left:
            outcome = outcomes[each.sequence]
            failed += [outcome] if isinstance(outcome, Exception) else []
            each.fail(outcome) if isinstance(outcome, Exception) else each.put(outcome, perf_counter())
        loop.leave([each.sequence for each in left if each.done])
        left = [each for each in left if not each.done]
        check_caches(loop)
    assert [str(error) for error in failed] in (["'mine'"], ["mine"]) and requests[1].error is failed[0]
    assert [tokens(requests[i]) for i in (0, 2)] == [alone(made, i) for i in (0, 2)]
    assert 12 <= 100 - stateful.left <= 14  # once for each token; the last path may end past the limit
    wanted = alone(made, 1)
    assert tokens(requests[1]) == wanted[: len(tokens(requests[1]))]


def test_a_prefill_that_raises_does_not_affect_the_running_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine("small")
    loop, first, second = runner(made), request(made, 0), request(made, 1)
    loop.join([first.sequence])
    first.put(loop.round()[first.sequence], perf_counter())  # type: ignore[arg-type]
    target_join = made.target.join

    def fail(prompts: list[list[int]]) -> None:
        target_join(prompts)
        raise ZeroDivisionError

    monkeypatch.setattr(made.target, "join", fail)
    with pytest.raises(ZeroDivisionError):
        loop.join([second.sequence])
    check_caches(loop)
    while not first.done:
        first.put(loop.round()[first.sequence], perf_counter())  # type: ignore[arg-type]
    assert tokens(first) == alone(made, 0)


# ---- memory


def lengths(*given: int) -> dict[Any, int]:
    """These lengths of different sequences."""
    return dict(enumerate(given))


def test_memory_is_counted_as_padded_rows() -> None:
    made = engine()
    loop: BatchRunner = runner(made, memory(made, 3, 50))
    assert loop.fits(lengths(50, 20, 1)) and not loop.fits(lengths(51, 20, 1)) and not loop.fits(lengths(*[50] * 4))
    assert loop.fits(lengths(loop.max_length)) and not loop.fits(lengths(loop.max_length + 1))
    assert runner(made).fits(lengths(10**9)) and runner(made).max_length is None


def test_the_estimate_of_a_row_is_what_the_cache_takes() -> None:
    for family in ("llama", "gpt2", "gemma3", "qwen3"):
        target = Target(tiny(family))
        estimate = target.decoder.row_bytes
        target.prefill([prompt()])
        assert target.decoder.cache.row_bytes == target.decoder.row_bytes == estimate > 0, family


def test_a_config_whose_layers_differ_has_an_estimate() -> None:
    class Config:
        hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads = 32, 3, 4, 2

        @property
        def head_dim(self) -> int:
            raise RuntimeError("it is a per-layer attribute")

    assert estimated_numbers_per_row(Config()) == 2 * 3 * 32


def test_rows_that_are_no_longer_needed_are_given_back() -> None:
    made = engine()
    loop, long, short = runner(made), request(made, 0, length=240), request(made, 1)
    made.target.decoder.model.config.max_position_embeddings = 2048
    long.sequence.tokens *= 4
    loop.join([long.sequence, short.sequence])
    loop.round()
    cache: KVCache = made.target.decoder.cache
    assert cache.capacity >= 960
    loop.leave([long.sequence])
    assert cache.capacity == GROWTH_ROWS
    loop.round()
    cache.check()
    loop.leave([short.sequence])
    assert made.target.decoder.lengths == [] and not made.target.decoder.cache.live
