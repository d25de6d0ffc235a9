"""Requests of an engine on fixed buffers: the scheduler, budgets of every policy, and what must run on the host."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from typing import Any

import pytest
import torch

from helpers.gpu import engine
from helpers.tiny import prompt
from windfall import registry
from windfall.engine.engine import Engine
from windfall.engine.gpu.batch import runner as batch_runner
from windfall.engine.gpu.batch.results import BatchStep
from windfall.engine.gpu.batch.runner import GpuBatchRunner
from windfall.engine.gpu.forward import Unsupported
from windfall.engine.split_runner import SplitRunner

PROMPTS = [prompt(length, seed=length) for length in (9, 70, 2, 14)]
TOKENS = 10
ASKED: dict[str, Any] = {"max_new_tokens": TOKENS, "eos": ()}
SMALL = {"beam": {"depth": 3, "k": 3, "nodes": 10}, "chain": {"depth": 3}}
BUDGETS = ["none", "beam", "chain", "auto", "tetris", "batch-gt", "smart", "survival"]


def made(policy: str, kind: str = "eagle3", **options: Any) -> Engine:
    found = engine("llama", kind, "beam", graphs=True)
    found.policy = registry.policy(policy, **{**SMALL.get(policy, {}), **options})
    return found


@cache
def plain_texts(**sampling: Any) -> list[list[int]]:
    """What any engine with this target writes after each prompt alone: by the host loop, without speculation."""
    alone = engine("llama", "eagle3", "none", graphs=False)
    return [alone.generate(each, **ASKED, **sampling).token_ids for each in PROMPTS]


def in_pages(found: Engine) -> GpuBatchRunner:
    runner = found._batch_runner()
    assert isinstance(runner, SplitRunner) and isinstance(runner.first, GpuBatchRunner), (
        found._dispatcher.batch_fallback
    )
    return runner.first


@pytest.mark.parametrize(
    ("policy", "greedy"), [*((policy, False) for policy in BUDGETS), *((policy, True) for policy in BUDGETS[:4])]
)
def test_the_texts_of_a_batch_are_those_of_single_requests(policy: str, greedy: bool) -> None:
    found, sampling = made(policy), {} if greedy else {"temperature": 1.0, "seed": 3}
    runner = in_pages(found)
    for _ in range(2 if policy == "beam" else 1):  # the second time, beginnings are known
        texts = found.generate_batch(PROMPTS, **ASKED, **sampling)
        assert [text.token_ids for text in texts] == plain_texts(**sampling)
    assert in_pages(found) is runner and runner.pool.available == runner.pool.pages


@pytest.mark.parametrize("policy", ["tetris", "smart"])
def test_a_policy_that_is_a_budget_runs_a_single_text_as_a_batch_of_one(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, wanted, text = made(policy), plain_texts()[1], PROMPTS[1]
    runner = in_pages(found)
    rounds = []
    monkeypatch.setattr(runner, "round", lambda own=runner.round: rounds.append(1) or own())
    assert found.generate(text, **ASKED).token_ids == wanted and rounds
    streamed = [token for step in found.stream(text, **ASKED) for token in step.tokens]
    assert streamed == wanted == found.generate_batch([text], **ASKED)[0].token_ids
    found.close()


def test_a_text_that_was_begun_elsewhere_goes_on() -> None:
    found, how = made("beam"), {**ASKED, "temperature": 1.0, "seed": 3}
    in_pages(found)
    whole = found.submit(PROMPTS[0], **how).result(60)
    assert whole.token_ids == plain_texts(temperature=1.0, seed=3)[0]
    for place in (1, 4, 9):
        rest = found.submit(PROMPTS[0], resume_token_ids=whole.token_ids[:place], **how).result(60)
        assert rest.steps[0].late_text is not None
        assert whole.token_ids[:place] + rest.token_ids == whole.token_ids
        known = found.target.tokenizer.decode(whole.token_ids[:place], skip_special_tokens=True)
        assert known + rest.text == known + "".join(step.text for step in rest.steps) == whole.text


def test_no_more_requests_run_than_the_largest_captured_round_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "SEATS", (1, 2))
    found = made("none")
    assert found.max_requests > len(PROMPTS) > in_pages(found).limits.seats == 2
    wanted = [found.generate(each, **ASKED).token_ids for each in PROMPTS]
    assert [text.token_ids for text in found.generate_batch(PROMPTS, **ASKED)] == wanted


def test_a_drafter_that_reads_no_pages_is_found_before_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads_none(forward: Any) -> Any:
        raise Unsupported("its attention is odd")

    found = made("beam", "lm")
    monkeypatch.setattr("windfall.engine.gpu.batch.drafters.in_pages", reads_none)
    monkeypatch.setattr(batch_runner, "BatchState", lambda *_: pytest.fail("memory was used"))
    assert found._paged_runner() is None
    assert found.batch_fallback == "its attention is odd"


def test_heads_that_are_too_wide_for_pages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made("beam", "lm")
    monkeypatch.setattr("windfall.engine.gpu.batch.build.fits_pages", lambda *_: False)
    monkeypatch.setattr(batch_runner, "BatchState", lambda *_: pytest.fail("memory was used"))
    assert found._paged_runner() is None
    assert found.batch_fallback == (
        "attention over pages needs too much shared memory for heads of width 8 on this GPU"
    )


def test_nothing_keeps_what_a_runner_had_when_it_could_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    found = made("beam")
    monkeypatch.setattr(batch_runner, "Round", fails)
    with pytest.raises(torch.OutOfMemoryError):
        found._dispatcher.paged(found.policy, found.online_costs, 2, None)
    assert found.gpu_runner is not None and not found.gpu_runner.gpu_target.graph_cache.independent


def test_a_step_does_not_keep_the_texts_of_other_requests() -> None:
    found = made("beam")
    texts = found.generate_batch(PROMPTS, **ASKED)
    kept, others = texts[0].steps, [weakref.ref(text.steps[0].late_text) for text in texts[1:]]
    tree = kept[0].tree
    assert isinstance(kept[0], BatchStep) and tree.arrays.tokens.base is None
    found.close()
    del texts, found
    gc.collect()
    assert kept[0].text == kept[0].late_text[0] and [other() for other in others] == [None] * 3


def test_the_memory_of_a_runner_is_freed_when_the_policy_changes() -> None:
    found = made("beam")
    found.generate_batch(PROMPTS[:2], **ASKED)
    assert found.batch_fallback == ""
    old = weakref.ref(in_pages(found))
    found._service._scheduler = None  # its thread may not have ended yet
    found.policy = registry.policy("none")
    gc.disable()  # a large cache must not wait for the garbage collector
    try:
        new = in_pages(found)
        assert old() is None and new.policy == found.policy
    finally:
        gc.enable()
    found.policy = registry.policy("svip")
    found.generate_batch(PROMPTS[:2], **ASKED)
    assert found.batch_fallback == "its policy decides during a cycle, on the host"


@pytest.mark.parametrize("policy", ["auto", "beam"])
def test_a_good_drafter_makes_rounds_fewer(policy: str) -> None:
    found = made(policy, kind="itself")
    texts = found.generate_batch(PROMPTS, **ASKED)
    assert max(len(text.steps) for text in texts) < TOKENS * 0.8


def test_requests_that_need_the_host_run_beside_the_others() -> None:
    found = made("beam")
    wanted = [found.generate(PROMPTS[0], **ASKED), found.generate(PROMPTS[1], repetition_penalty=1.3, **ASKED)]
    handles = [found.submit(PROMPTS[0], **ASKED), found.submit(PROMPTS[1], repetition_penalty=1.3, **ASKED)]
    other = found.submit(PROMPTS[0], policy="svip", **ASKED)
    reported = found.submit(PROMPTS[1], logprobs=2, **ASKED)
    assert [handle.result(60).token_ids for handle in handles] == [text.token_ids for text in wanted]
    assert other.result(60).token_ids == wanted[0].token_ids
    assert reported.result(60).token_ids == plain_texts()[1]
    assert [each.token for each in reported.result().logprobs or ()] == plain_texts()[1]
    found.close()


def test_little_memory_is_enough_for_one_after_another() -> None:
    found = made("beam")
    whole = in_pages(found)
    bytes_of_page = whole.target.kv[:, :, :, :64].nbytes + whole.drafter.kv[:, :, :, :64].nbytes  # type: ignore[union-attr]
    small = Engine(found.target, found.drafter, found.policy, True, found.gpu_options, kv_memory=6 * bytes_of_page)
    assert in_pages(small).pool.pages == 5
    texts = small.generate_batch(PROMPTS, **ASKED)
    assert [text.token_ids for text in texts] == plain_texts()
    assert in_pages(small).pool.available == 5


def test_memory_is_counted_where_a_request_runs() -> None:
    """The host loop has room for its own request, though not for all; no request is prefilled twice."""
    found = made("beam")
    rows = found.target.decoder.row_bytes + found.drafter.row_bytes
    found._kv_memory = 600 * rows
    asked = [{}, {}, {}, {"repetition_penalty": 1.3}]
    handles = [found.submit(prompt(100, seed=n), **ASKED, **own) for n, own in enumerate(asked)]
    texts = [handle.result(60) for handle in handles]
    assert in_pages(found).pool.available == in_pages(found).pool.pages
    assert not any(step.prefill_seconds for text in texts for step in text.steps[1:])
    assert all(text.steps[0].prefill_seconds >= 0 for text in texts)
