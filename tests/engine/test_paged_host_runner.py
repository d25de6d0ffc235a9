"""Requests that need the host in every cycle and share verify passes on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.cli import character_tokenizer
from helpers.gpu import engine
from helpers.tiny import prompt, tiny
from windfall import registry
from windfall.core.types import InputError, SamplingParams, Step
from windfall.engine.engine import Engine
from windfall.engine.gpu.batch.paged_target import PagedTarget
from windfall.engine.paged_host_runner import PagedHostRunner
from windfall.model.target import Target

TOKENS = 14
ASKED: dict[str, Any] = {"max_new_tokens": TOKENS, "eos": ()}
LENGTHS = (9, 70, 1, 33, 2, 20, 14)


def exclude_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, (ids.shape[1] % 2) :: 2] -= 1.5
    return scores


SAMPLINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5, "logprobs": 2},
    {"logprobs": 1},
    {"logit_bias": {5: 3.0, 7: -100.0}, "temperature": 0.8, "seed": 1},
    {"processors": (exclude_even,)},
    {"temperature": 1.0, "seed": 9, "top_p": 0.8, "logprobs": 0, "logprobs_mode": "processed"},
    {"prompt_logprobs": 1},
]


def passes(found: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sequences in each verify pass for the host loop, as they happen."""
    counts, score = [], PagedTarget._score

    def counted(target: PagedTarget, seats: range, *rest: Any) -> Any:
        counts.append(len(seats))
        return score(target, seats, *rest)

    monkeypatch.setattr(PagedTarget, "_score", counted)
    return counts


def all_pages_are_free(found: Engine) -> bool:
    paged = found._paged()
    assert paged is not None and paged.target is not None
    return paged.target.cache.pool.available == paged.target.cache.pool.pages


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("eagle3", "auto"),
        ("eagle3", "none"),
        ("lm", "beam"),
        ("ngram", "auto"),
        ("eagle3", "bandit"),
        ("block", "auto"),
    ],
)
def test_texts_are_those_of_single_requests(kind: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside requests that draw on the device; some join later."""
    found = engine("llama", kind, policy, graphs=True)
    asked = [(prompt(length, seed=length), {**ASKED, **own}) for length, own in zip(LENGTHS, SAMPLINGS, strict=True)]
    asked += [(text, {**ASKED, "temperature": 1.0, "seed": 4}) for text, _ in asked[:3]]
    alone = [found.generate(text, **how) for text, how in asked]
    counts = passes(found, monkeypatch)
    handles = [found.submit(text, **how) for text, how in asked[:5]]
    next(iter(handles[1]))
    handles += [found.submit(text, **how) for text, how in asked[5:]]
    together = [handle.result(60) for handle in handles]
    assert [text.token_ids for text in together] == [text.token_ids for text in alone]
    for one, other in zip(together, alone, strict=True):
        found_, wanted = (text.logprobs or () for text in (one, other))
        assert [each.token for each in found_] == [each.token for each in wanted]
        assert [each.logprob for each in found_] == pytest.approx([each.logprob for each in wanted])
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
    assert max(counts) >= 3
    found.close()
    assert all_pages_are_free(found)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_texts_in_bf16_have_the_same_bits(family: str) -> None:
    """In exact passes: alone in the buffers of single texts, and together in pages."""
    bf16 = Target(tiny(family, dtype=torch.bfloat16), character_tokenizer())
    found = engine(family, "ngram", "beam", graphs=True, exact=True, target=bf16)
    assert found.exact_passes
    asked = [(prompt(70, seed=1), {"logprobs": 1}), (prompt(9), {"temperature": 1.0, "seed": 2, "logprobs": 1})]
    asked.append((prompt(20), {"repetition_penalty": 1.2}))
    alone = [found.generate(text, **ASKED, **how) for text, how in asked]
    handles = [found.submit(text, **ASKED, **how) for text, how in asked]
    together = [handle.result(60) for handle in handles]
    assert [text.token_ids for text in together] == [text.token_ids for text in alone]
    assert [text.logprobs for text in together] == [text.logprobs for text in alone]
    found.close()


@pytest.mark.parametrize("name", ["bandit", "salf"])
def test_policies_that_decide_on_the_host_share_verify_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = engine("llama", "eagle3", name, graphs=True, exact=True)
    alone = [found.generate(prompt(length, seed=length), **ASKED).token_ids for length in LENGTHS[:4]]
    counts = passes(found, monkeypatch)
    texts = found.generate_batch([prompt(length, seed=length) for length in LENGTHS[:4]], **ASKED)
    assert [text.token_ids for text in texts] == alone
    assert found.batch_fallback and counts[0] == 4 and len(counts) <= TOKENS
    assert name == "bandit" or any(step.rows > 1 for text in texts for step in text.steps)
    found.close()


def test_requests_with_other_policies_share_verify_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding of some requests, for example, while the others are drafted in rounds of their own."""
    found = engine("llama", "eagle3", "auto", graphs=True)
    wanted = found.generate(prompt(9), **ASKED).token_ids
    counts = passes(found, monkeypatch)
    handles = [found.submit(prompt(9), policy=name, **ASKED) for name in ("none", "beam", None, "svip", "none")]
    assert [handle.result(60).token_ids for handle in handles] == [wanted] * 5
    assert max(counts) == 4
    found.close()


def test_constraints_share_verify_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.grammars import SCHEMA, target
    from windfall.core.types import GpuOptions
    from windfall.drafters.ngram import NGramDrafter

    options = GpuOptions(True, exact=False)
    found = Engine(target(), NGramDrafter(), registry.policy("auto"), True, options)
    how = [{"json_schema": SCHEMA}, {"regex": "[ab]{3}[cd]{9}"}, {"json_schema": SCHEMA, "temperature": 1.0, "seed": 5}]
    alone = [found.generate(prompt(9), max_new_tokens=40, **own) for own in how]
    counts = passes(found, monkeypatch)
    handles = [found.submit(prompt(9), max_new_tokens=40, **own) for own in how]
    assert [handle.result(60).token_ids for handle in handles] == [text.token_ids for text in alone]
    assert max(counts) == 3
    found.close()


def test_little_memory_is_shared_with_rounds() -> None:
    """Requests of both kinds wait or are preempted until there are pages; a text that fills all of them is decoded."""
    found = engine("llama", "ngram", "none", graphs=True)
    page = 64 * found.target.decoder.row_bytes
    small = Engine(found.target, found.drafter, found.policy, True, found.gpu_options, kv_memory=7 * page)
    asked = [(prompt(40 + 9 * n, seed=n), {"repetition_penalty": 1.2} if n % 2 else {}) for n in range(5)]
    alone = [found.generate(text, **ASKED, **how).token_ids for text, how in asked]
    handles = [small.submit(text, **ASKED, **how) for text, how in asked]
    assert [handle.result(60).token_ids for handle in handles] == alone
    assert all_pages_are_free(small)
    how = {"max_new_tokens": 90, "eos": (), "logprobs": 0}
    lengths = (60, 61)
    whole = [found.generate(prompt(length), **how).token_ids for length in lengths]
    handles = [small.submit(prompt(length), **how) for length in lengths]
    assert [handle.result(60).token_ids for handle in handles] == whole
    assert small.counters.preemptions > 0 and all_pages_are_free(small)
    small.close()


def test_a_large_cache_of_the_drafter_limits_the_texts() -> None:
    found = engine("llama", "lm", "bandit", graphs=True)  # whose cache has two thirds of the target's size
    paged = found._paged()
    assert paged is not None and paged.target is not None
    runner = PagedHostRunner(paged.target, found.drafter, found.online_costs)
    texts = [found._request(prompt(9), found.params(**ASKED)).sequence for _ in range(8)]
    assert runner.fits(dict.fromkeys(texts[:4], 9)) and not runner.fits(dict.fromkeys(texts, 100))
    assert runner.pages_needed(dict.fromkeys(texts, 100)) <= paged.target.cache.pool.pages
    found.close()


def test_cancelled_requests_and_errors_leave_no_pages() -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 12:
            raise ValueError("no more")
        return scores

    found = engine("llama", "eagle3", "auto", graphs=True)
    wanted = found.generate(prompt(20), repetition_penalty=1.2, **ASKED).token_ids
    bad = found.submit(prompt(9), processors=(fails,), **ASKED)
    good = found.submit(prompt(20), repetition_penalty=1.2, **ASKED)
    late = found.submit(prompt(14), repetition_penalty=1.2, max_new_tokens=200, eos=())
    assert isinstance(next(iter(late)), Step)
    late.cancel()
    assert good.result(60).token_ids == wanted
    with pytest.raises(ValueError, match="no more"):
        bad.result(60)
    found.close()
    assert all_pages_are_free(found)


def test_a_tree_that_is_too_large_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on with the same texts."""
    found = engine("llama", "eagle3", "bandit", graphs=True)
    wanted = found.generate(prompt(9), **ASKED).token_ids
    huge = registry.policy("beam", nodes=400, k=20, depth=6)
    handles = [found.submit(prompt(9), policy=huge, **ASKED), found.submit(prompt(9), **ASKED)]
    assert handles[1].result(60).token_ids == wanted
    with pytest.raises(InputError, match="320 rows at the most on a GPU, not 400"):
        handles[0].result(60)
    found.close()
    assert all_pages_are_free(found)


def test_processed_logprobs_of_a_text_that_moves() -> None:
    """A prompt of one token begins in the host loop, where the host draws; in pages, the pass does."""
    found = engine("llama", "ngram", "beam", graphs=True)
    how = {"logprobs": 0, "logprobs_mode": "processed", "temperature": 1.0, "seed": 9, "top_p": 0.8}
    asked: dict[str, Any] = {"max_new_tokens": 150, "eos": (), **how}
    alone = found.generate(prompt(1), **asked)
    moving = found.submit(prompt(1), **asked)
    next(iter(moving))
    other = found.submit(prompt(9), repetition_penalty=1.2, **ASKED)
    moved = moving.result(60)
    other.result(60)
    assert moved.token_ids == alone.token_ids
    logprobs = [[each.logprob for each in text.logprobs or ()] for text in (moved, alone)]
    assert logprobs[0] == pytest.approx(logprobs[1])
    found.close()


def test_larger_trees_than_before_wait_for_pages() -> None:
    """A request does not fail because others use the pages that its tree needs: the scheduler makes room first."""
    found = engine("llama", "eagle3", "svip", graphs=True)
    page, large = 64 * found.target.decoder.row_bytes, registry.policy("beam", nodes=200, k=20, depth=6)
    small = Engine(found.target, found.drafter, found.policy, True, found.gpu_options, kv_memory=9 * page)
    paged = small._paged()
    assert paged is not None and paged.target is not None
    runner, pool = PagedHostRunner(paged.target, small.drafter, small.online_costs), paged.target.cache.pool
    text, params = prompt(20), SamplingParams(**ASKED)
    sequence = small._request(text, params, large).sequence
    runner.join([sequence])
    others = pool.take(pool.pages - 2)
    assert runner.fits({sequence: 20, small._request(text, params).sequence: 20})
    assert runner.round() == {} and sequence.tokens == text
    assert runner.pages_needed({sequence: 20}) > 2
    pool.release(others)
    while sequence.finish is None:
        assert isinstance(runner.round()[sequence], Step)
    assert sequence.tokens[20:] == found.generate(text, **ASKED).token_ids
    runner.leave([sequence])
    assert pool.available == pool.pages


def test_a_runner_keeps_its_graphs_between_busy_times() -> None:
    found = engine("llama", "eagle3", "bandit", graphs=True)
    first, second = (found._batch_runner() for _ in range(2))
    one, other = (runner._together for runner in (first, second))  # type: ignore[attr-defined]
    assert isinstance(one, PagedHostRunner) and one is not other and one.target is other.target
