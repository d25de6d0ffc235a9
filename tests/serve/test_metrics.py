"""GET /metrics: its numbers are those of the answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.scheduling import held
from helpers.serving import MODEL, Serving, engine, http, new_engine, running, wait_for
from windfall.engine.engine import Engine
from windfall.serve.app import make_app
from windfall.serve.metrics import REFUSALS
from windfall.serve.settings import Settings

BODY = {"model": MODEL, "prompt": "aaaa aaaa aaaa", "max_tokens": 12, "ignore_eos": True, "temperature": 0}


def scraped(url: str, **headers: str) -> dict[tuple[str, ...], float]:
    """The values by name and by the values of labels other than the model's name."""
    answer = http().get(f"{url}/metrics", headers=headers)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = [sample for family in text_string_to_metric_families(answer.text) for sample in family.samples]
    assert {sample.labels.get("model_name", MODEL) for sample in samples} == {MODEL}
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "model_name")): sample.value
        for sample in samples
    }


@pytest.fixture(scope="module")
def served(serving: Serving) -> Iterator[tuple[Engine, str]]:
    made = new_engine(max_requests=2)
    with serving(made, Settings(max_queue=0)) as url:
        yield made, url
    made.close()


def test_counts_are_those_of_usage(served: tuple[Engine, str]) -> None:
    before = scraped(served[1])
    usage = http().post(f"{served[1]}/v1/completions", json=BODY).json()["usage"]
    found = {key: value - before.get(key, 0) for key, value in scraped(served[1]).items()}
    about = usage["speculation"]
    assert found["windfall:prompt_tokens_total",] == usage["prompt_tokens"]
    assert found["windfall:generation_tokens_total",] == usage["completion_tokens"] == 12
    assert found["windfall:target_passes_total",] == about["target_passes"]
    assert found["windfall:draft_passes_total",] == about["draft_passes"] > 0
    assert found["windfall:rows_per_pass_sum",] == about["target_passes"] + about["verified_tokens"]
    assert found["windfall:accepted_length_sum",] == 12
    assert found["windfall:accepted_length_bucket", "+Inf"] == about["target_passes"]
    for prefix in ("vllm:spec_decode_", "windfall:"):
        assert found[f"{prefix}num_accepted_tokens_total",] == about["accepted_tokens"] > 0
        assert found[f"{prefix}num_draft_tokens_total",] == about["verified_tokens"]
        assert 0 < found[f"{prefix}num_drafts_total",] <= about["target_passes"]
        assert found[f"{prefix}num_accepted_tokens_per_pos_total", "0"] > 0
    assert found["windfall:time_to_first_token_seconds_count",] == 1
    assert found["windfall:e2e_request_latency_seconds_count", "length"] == 1
    assert found["windfall:http_requests_total", "/v1/completions", "200"] == 1
    assert scraped(served[1])["process_resident_memory_bytes",] > 0


def test_gauges_show_queue_memory_and_budget(serving: Serving) -> None:
    made = new_engine(max_requests=2)
    gate, _ = held(made)
    try:
        with serving(made) as url, ThreadPoolExecutor(2) as threads:
            idle = scraped(url)
            assert idle["windfall:num_requests_running",] == 1 and idle["windfall:num_requests_waiting",] == 0
            answers = [threads.submit(http().post, f"{url}/v1/completions", json=BODY) for _ in range(2)]
            wait_for(lambda: scraped(url)["windfall:num_requests_waiting",] == 2)
            gate.open.set()
            assert [answer.result().status_code for answer in answers] == [200, 200]
            wait_for(lambda: scraped(url)["windfall:num_requests_running",] == 0)
            after = scraped(url)
            assert after["windfall:kv_cache_usage_perc",] == 0 and ("windfall:budget_rows",) not in after
            second, _ = held(made)
            made.submit([1, 2, 3], max_new_tokens=90, eos=())
            second.open.set()
            wait_for(lambda: made.counters.use.budget)
            assert (made.counters.use.memory or 0) > 0
    finally:
        gate.open.set()
        made.close()


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/completions", {**BODY, "colour": 1}, "bad_request"),
        ("/v1/completions", {**BODY, "model": "other"}, "not_found"),
        ("/nothing", {}, "not_found"),
        ("/metrics", {}, "method_not_allowed"),
        ("/v1/completions", {**BODY, "prompt": "a" * 5_000_000}, "body_too_large"),
    ],
)
def test_refusals_have_a_reason(served: tuple[Engine, str], path: str, body: dict[str, Any], reason: str) -> None:
    key = ("windfall:requests_refused_total", reason)
    before = scraped(served[1])[key]
    assert http().post(served[1] + path, json=body).is_client_error
    assert scraped(served[1])[key] == before + 1


def test_a_full_queue_is_a_refusal(served: tuple[Engine, str]) -> None:
    made, url = served
    gate, _ = held(made)
    try:
        with ThreadPoolExecutor(2) as threads:
            waiting = [threads.submit(http().post, f"{url}/v1/completions", json=BODY) for _ in range(2)]
            wait_for(lambda: made.running + made.waiting == 3)
            assert http().post(f"{url}/v1/completions", json=BODY).status_code == 429
            gate.open.set()
            assert all(each.result().status_code == 200 for each in waiting)
    finally:
        gate.open.set()
    assert scraped(url)["windfall:requests_refused_total", "queue_full"] == 1


def test_metrics_need_the_key() -> None:
    with running(engine(), Settings(api_keys=("secret",))) as url:
        assert http().get(f"{url}/metrics").status_code == 401
        found = scraped(url, Authorization="Bearer secret")
        assert found["windfall:requests_refused_total", "invalid_api_key"] == 1


def test_applications_have_metrics_of_their_own() -> None:
    made = new_engine()
    with running(made) as one, running(made) as other:
        http().get(f"{one}/v1/models")
        assert ("windfall:http_requests_total", "/v1/models", "200") in scraped(one)
        assert ("windfall:http_requests_total", "/v1/models", "200") not in scraped(other)
    assert make_app(made) is not make_app(made)
    made.close()


def test_the_page_has_all_metrics_and_reasons(address: str) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text("utf-8")
    families = text_string_to_metric_families(http().get(f"{address}/metrics").text)
    names = [each.name + ("_total" if each.type == "counter" else "") for each in families if ":" in each.name]
    assert len(names) > 20 and [name for name in names if f"`{name}`" not in page] == []
    assert [reason for reason in REFUSALS.values() if f"`{reason}`" not in page] == []
