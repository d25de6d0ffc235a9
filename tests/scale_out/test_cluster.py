"""Two replicas on a real Ray cluster: sessions, lost replicas, disconnects, a full queue, and the end."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.cli import SPECIAL, character_tokenizer
from helpers.deploy import ROOT
from helpers.ray_cluster import cluster, exported, kill_the_busiest, metrics, replicas, wait_for_replicas
from helpers.serving import client, http, wait_for
from helpers.tiny import tiny
from windfall.engine.engine import Engine
from windfall.engine.loading import load

OPT_IN = "RUN_RAY"  # environment variable
pytestmark = pytest.mark.skipif(
    not os.environ.get(OPT_IN), reason=f"starts a Ray cluster, which takes a minute; {OPT_IN}=1 runs it"
)

MESSAGES = [{"role": "user", "content": "Hi"}]
LONG = 400  # tokens
END = SPECIAL.index("<|end|>")
OPTIONS = {"policy": "chain", "max_requests": 3, "max_queue": 1, "max_queued_requests": 6, "min_replicas": 2}
ANSWERS = 'windfall:http_requests_total{route="/v1/completions",status="200"}'
CANCELLED = 'windfall:e2e_request_latency_seconds_count{model_name="tiny",reason="cancelled"}'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny(num_hidden_layers=2, max_position_embeddings=2048).save_pretrained(place)
    character_tokenizer().save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with cluster(target=str(model), drain_seconds=60, **OPTIONS) as address:
        yield address


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Engine]:
    with load(str(model), policy="none", device="cpu") as engine:
        yield engine


def documented(url: str, resumed: list[int] | None = None) -> Callable[..., Iterator[str]]:
    """The function `stream` of docs/serve.md. `resumed` gets the number of tokens that each of its requests sends."""
    page = (ROOT / "docs" / "serve.md").read_text("utf-8")
    section = page[page.index("## Resume a text") :]
    (code,) = re.findall(r"```python\n(.*?)^model = ", section, re.DOTALL | re.MULTILINE)[:1]
    names: dict[str, Any] = {}
    exec(code, names)
    names["client"] = made = client(url)
    create: Any = made.chat.completions.create

    def noted(**given: Any) -> Any:
        if resumed is not None:
            resumed.append(len(given["extra_body"]["resume_token_ids"]))
        return create(**given)

    made.chat.completions.create = noted  # type: ignore[method-assign]
    stream: Callable[..., Iterator[str]] = names["stream"]
    return stream


def request(seed: int) -> dict[str, Any]:
    """A request at temperature 1, for the function of the documentation."""
    how = {"logit_bias": {str(END): -100}, "max_tokens": LONG, "seed": seed, "temperature": 1}
    return {"model": "tiny", "messages": MESSAGES, **how}


def expected(alone: Engine, seed: int) -> str:
    done = alone.generate(MESSAGES, max_new_tokens=LONG, temperature=1.0, seed=seed, logit_bias={END: -100})
    assert len(done.token_ids) == LONG
    return done.text


def completion(**more: Any) -> dict[str, Any]:
    return {"prompt": "Hi", "max_tokens": 2, "seed": 1, **more}


def test_a_session_stays_with_one_replica(url: str) -> None:
    for _ in range(12):
        answer = http().post(f"{url}/v1/completions", json=completion(), headers={"X-Session-Id": "anna"})
        assert answer.status_code == 200 and len(answer.headers.get_list("x-request-id")) == 1
    assert metrics(url, "anna")[ANSWERS] == 12  # and other sessions have the other replica
    assert {metrics(url, str(number)).get(ANSWERS, 0) for number in range(20)} == {0, 12}


def test_ray_exports_the_metrics_of_all_replicas(url: str) -> None:
    for number in range(8):
        session = {"X-Session-Id": str(number)}
        assert http().post(f"{url}/v1/completions", json=completion(), headers=session).status_code == 200
    own = [metrics(url, str(number)) for number in range(8)]
    name = 'windfall:generation_tokens_total{model_name="tiny"}'
    expected = {each[name] for each in own}  # by replica

    def values(name: str, **labels: str) -> dict[str, float]:
        fits = [each for each in exported() if each.name == name and labels.items() <= each.labels.items()]
        fits = [each for each in fits if each.labels.get("replica")]  # and not of replicas that ran in this process
        assert all(each.labels["deployment"] == each.labels["application"] == "windfall" for each in fits)
        return {each.labels["replica"]: each.value for each in fits}

    def arrived() -> bool:  # health checks generate tokens, too
        found = values("ray_windfall_generation_tokens_total", model_name="tiny").values()
        return len(found) == 2 and min(found) >= min(expected) and max(found) >= max(expected)

    wait_for(arrived, 60)
    answers = values("ray_windfall_http_requests_total", route="/v1/completions", status="200")
    assert sum(answers.values()) == sum({each[name]: each[ANSWERS] for each in own}.values())
    counts = values("ray_windfall_time_to_first_token_seconds_bucket", le="+Inf")
    assert counts.keys() == answers.keys() and all(counts[each] >= answers[each] for each in counts)


def test_a_disconnect_cancels_the_text(url: str) -> None:
    session, before = {"X-Session-Id": "anna"}, metrics(url, "anna")[CANCELLED]
    body = completion(max_tokens=1500, ignore_eos=True, stream=True)
    with http().stream("POST", f"{url}/v1/completions", json=body, headers=session) as answer:
        next(answer.iter_lines())
    wait_for(lambda: metrics(url, "anna")[CANCELLED] == before + 1)


def test_a_stream_goes_on_when_its_replica_is_killed(url: str, alone: Engine) -> None:
    wait_for_replicas(2)
    pieces: list[str] = []
    resumed: list[int] = []
    for piece in documented(url, resumed)(**request(5)):
        pieces.append(piece)
        if len(pieces) == 20:
            killed = kill_the_busiest()
    assert "".join(pieces) == expected(alone, 5)
    assert resumed[0] == 0 and 20 <= resumed[-1] < LONG
    wait_for_replicas(2)
    assert killed not in replicas()


def test_no_request_is_lost_when_a_replica_is_killed_under_load(url: str, alone: Engine) -> None:
    wait_for_replicas(2)
    begun = threading.Semaphore(0)
    resumed: list[int] = []

    def streamed(seed: int) -> str:
        pieces = []
        for piece in documented(url, resumed)(**request(seed)):
            if len(pieces) == 2:
                begun.release()
            pieces.append(piece)
        return "".join(pieces)

    def whole(seed: int) -> str:
        with client(url).with_options(max_retries=5) as api:
            return api.chat.completions.create(**request(seed)).choices[0].message.content or ""

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(streamed, seed) for seed in range(6)]
        answers = [pool.submit(whole, seed) for seed in (6, 7)]
        assert all(begun.acquire(timeout=60) for _ in range(3))
        kill_the_busiest()
        texts = [each.result(120) for each in (*streams, *answers)]
    assert texts == [expected(alone, seed) for seed in range(8)]
    assert len(resumed) > 6 and any(resumed)
    wait_for_replicas(2)


def test_a_full_queue_is_answered_with_429(url: str) -> None:
    body = completion(max_tokens=300, ignore_eos=True)

    def ask(_: int) -> httpx.Response:
        with httpx.Client(timeout=120) as own:
            return own.post(f"{url}/v1/completions", json=body)

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(ask, range(24)))
    refused = [each for each in answers if each.status_code != 200]
    assert refused and len(answers) - len(refused) >= 8
    assert {each.status_code for each in refused} == {429} and all(each.headers["retry-after"] for each in refused)


def test_running_texts_finish_when_the_application_ends(url: str, alone: Engine) -> None:
    """The last test: it ends the application."""
    from ray import serve

    pieces, ending = [], threading.Thread(target=serve.delete, args=("windfall",))
    for piece in documented(url)(attempts=1, **request(5)):
        pieces.append(piece)
        if len(pieces) == 10:
            ending.start()
    assert "".join(pieces) == expected(alone, 5)
    ending.join(60)
    wait_for_replicas(0)
