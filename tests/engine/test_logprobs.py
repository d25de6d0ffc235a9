"""Log-probabilities of generated tokens and of prompts: those of the model, with and without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.random_parallel import some_drafter
from helpers.sampling import SAMPLING
from helpers.scheduling import request, runner
from helpers.tiny import VOCABULARY, prompt, tiny
from windfall import registry
from windfall.core.logprobs import TokenLogprob
from windfall.core.sampling import process
from windfall.core.types import GpuOptions, SamplingParams, Step
from windfall.engine.engine import Engine, Generation
from windfall.model import target as target_module
from windfall.model.target import Target

NEW = 10
CLOSE = 2e-5  # logits of a row differ by rounding, which depends on the other rows of a pass


@cache
def engine(family: str = "llama", **changes: Any) -> Engine:
    return Engine(Target(tiny(family, num_hidden_layers=2)), some_drafter("lm"), registry.policy("beam"), **changes)


def made(policy: str, text: list[int], **sampling: Any) -> Generation:
    used = engine()
    used.policy = registry.policy(policy)
    return used.generate(text, **{"max_new_tokens": NEW, "eos": (), "seed": 3, "logprobs": 3, **sampling})


@torch.no_grad()
def plain_logits(text: list[int], model: Any = None) -> Tensor:
    """The logits after every token of a text, in one pass of the model."""
    model = engine().target.model if model is None else model
    return model(input_ids=torch.tensor([text])).logits[0]


def check(found: Sequence[TokenLogprob] | None, tokens: list[int], logits: Tensor, count: int = 3) -> None:
    """These are the log-probabilities of the tokens and of the most likely ones."""
    assert found is not None and [each.token for each in found] == tokens
    logs = logits.log_softmax(-1)
    for each, row in zip(found, logs, strict=True):
        assert each.logprob == pytest.approx(row[each.token].item(), abs=CLOSE)
        values = [value for value in row.topk(count).values.tolist() if value > -torch.inf]
        assert [value for _, value in each.top] == pytest.approx(values, abs=CLOSE)
        assert [row[token].item() for token, _ in each.top] == pytest.approx(values, abs=CLOSE)


@pytest.mark.parametrize("name", SAMPLING)
def test_raw_ones_are_those_of_the_model(name: str) -> None:
    for policy in ("none", "beam", "auto"):
        answer = made(policy, prompt(), **SAMPLING[name])
        rows = plain_logits(prompt() + answer.token_ids)[len(prompt()) - 1 : -1]
        check(answer.logprobs, answer.token_ids, rows)
        assert policy != "beam" or answer.stats.tau > 1.5  # several tokens came from one pass


@pytest.mark.parametrize("policy", registry.policies())
def test_every_policy_has_the_same(policy: str) -> None:
    plain, answer = (made(each, prompt(), temperature=0.8, max_new_tokens=6) for each in ("none", policy))
    assert plain.logprobs is not None and answer.logprobs is not None
    for one, other in zip(plain.logprobs, answer.logprobs, strict=True):
        assert (one.token, [token for token, _ in one.top]) == (other.token, [token for token, _ in other.top])
        assert one.logprob == pytest.approx(other.logprob, abs=CLOSE)


@pytest.mark.parametrize("policy", ["none", "beam", "auto"])
@pytest.mark.parametrize("name", SAMPLING)
def test_processed_ones_are_those_that_tokens_are_drawn_from(name: str, policy: str) -> None:
    text, sampling = prompt(), SAMPLING[name]
    answer = made(policy, text, logprobs_mode="processed", **sampling)
    whole, params = text + answer.token_ids, SamplingParams(seed=3, **sampling)
    rows = [
        process(row[None], torch.tensor([whole[: len(text) + place]]), len(text), params)[0]
        for place, row in enumerate(plain_logits(whole)[len(text) - 1 : -1])
    ]
    check(answer.logprobs, answer.token_ids, torch.stack(rows))
    assert answer.token_ids == made(policy, text, logprobs=None, **sampling).token_ids  # asking changes no text


def test_with_logits_processors_that_write_into_their_input() -> None:
    calls: list[int] = []

    def ban(prefix: Tensor, scores: Tensor) -> Tensor:
        calls.append(prefix.shape[1])
        scores[:, : VOCABULARY // 2] = -torch.inf
        return scores

    text = prompt()
    for policy in ("none", "beam"):
        calls.clear()
        raw = made(policy, text, processors=(ban,))
        assert calls == list(range(len(text), len(text) + NEW))  # once for each token
        logits = plain_logits(text + raw.token_ids)[len(text) - 1 : -1]
        check(raw.logprobs, raw.token_ids, logits)
        processed = made(policy, text, processors=(ban,), logprobs_mode="processed")
        check(processed.logprobs, raw.token_ids, ban(torch.zeros(1, 0), logits.clone()))


def test_every_step_has_those_of_its_tokens() -> None:
    ended = made("beam", prompt(), max_new_tokens=7)
    eos = ended.token_ids[4]
    answer = made("beam", prompt(), eos=(eos,))
    assert answer.token_ids == ended.token_ids[: ended.token_ids.index(eos) + 1]
    for step in answer.steps:
        assert step.logprobs is not None and tuple(each.token for each in step.logprobs) == step.tokens
    assert made("beam", prompt(), logprobs=0).logprobs == [
        TokenLogprob(each.token, each.logprob) for each in made("beam", prompt()).logprobs or ()
    ]
    plain = made("beam", prompt(), logprobs=None)
    assert plain.logprobs is None and plain.prompt_logprobs is None


def test_requests_that_run_together_each_have_their_own() -> None:
    used = engine()
    used.policy = registry.policy("beam")
    texts = [prompt(length, length) for length in (9, 30, 2, 17)]
    how: dict[str, Any] = {"max_new_tokens": NEW, "eos": (), "seed": 3, "temperature": 0.9}
    handles = [used.submit(text, logprobs=place, **how) for place, text in enumerate(texts)]
    together = used.generate_batch(texts, logprobs=2, **how)
    for place, (text, handle, batch) in enumerate(zip(texts, handles, together, strict=True)):
        answer = handle.result(60)
        assert answer.token_ids == batch.token_ids
        rows = plain_logits(text + answer.token_ids)[len(text) - 1 : -1]
        check(answer.logprobs, answer.token_ids, rows, place)
        check(batch.logprobs, answer.token_ids, rows, 2)


def test_a_stream_has_them() -> None:
    text, tokens, found = prompt(), list[int](), list[TokenLogprob]()
    steps = list(engine().stream(text, logprobs=2, prompt_logprobs=1, max_new_tokens=NEW, eos=()))
    for step in steps:
        tokens += step.tokens
        found += step.logprobs or ()
    check(found, tokens, plain_logits(text + tokens)[len(text) - 1 : -1], 2)
    assert [len(step.prompt_logprobs or ()) for step in steps] == [len(text)] + [0] * (len(steps) - 1)


# ---- prompts


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2"])
def test_those_of_a_prompt(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "MAX_PROMPT_LOGIT_ROWS", 8)  # several passes
    text, used = prompt(29), engine(family)
    answer = used.generate(text, max_new_tokens=3, prompt_logprobs=3, temperature=0.5, logit_bias={3: 5.0})
    found = answer.prompt_logprobs
    assert found is not None and found[0] is None and answer.logprobs is None
    check([each for each in found if each], text[1:], plain_logits(text, used.target.model)[:-1])
    assert used.generate(text[:1], max_new_tokens=3, prompt_logprobs=0).prompt_logprobs == [None]


def test_a_preempted_request_has_those_of_its_prompt_once() -> None:
    used = engine()
    preempted = request(used, 4, max_new_tokens=NEW, eos=(), logprobs=1, prompt_logprobs=1)
    text, loop = list(preempted.sequence.tokens), runner(used)
    while not preempted.done:  # it leaves after every round
        loop.join([preempted.sequence])
        outcome = loop.round()[preempted.sequence]
        assert isinstance(outcome, Step)
        preempted.put(outcome, perf_counter())
        loop.leave([preempted.sequence])
    answer = preempted.generation()
    check(answer.logprobs, answer.token_ids, plain_logits(text + answer.token_ids)[len(text) - 1 : -1], 1)
    assert (
        len(answer.steps) > 1
        and [step.prompt_logprobs for step in answer.steps[1:]].count(None) == len(answer.steps) - 1
    )
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == len(text)


# ---- on the GPU runner


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 12, "top_p": 0.9}])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_in_place_of_the_gpu_runner_the_host_loop_decodes(sampling: dict[str, Any], mode: str) -> None:
    used = Engine(engine().target, some_drafter("lm"), registry.policy("beam"), gpu_options=GpuOptions(graphs=True))
    how: dict[str, Any] = {"max_new_tokens": NEW, "eos": (), "seed": 3, **sampling}
    on_device = used.generate(prompt(), **how)
    assert used.fallback == ""
    answer = used.generate(prompt(), logprobs=3, logprobs_mode=mode, **how)
    assert "log-probabilities" in used.fallback and answer.token_ids == on_device.token_ids
    on_host = made("beam", prompt(), logprobs_mode=mode, **sampling)
    assert answer.token_ids == on_host.token_ids and answer.logprobs is not None
    for one, other in zip(answer.logprobs, on_host.logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=CLOSE)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
