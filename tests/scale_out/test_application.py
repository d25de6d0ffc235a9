"""The application for Ray Serve: its options, and a replica in this process."""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install windfall[ray]")

import click
import yaml
from ray import serve

import windfall.ray
from helpers.cli import folder as folder
from helpers.deploy import DEPLOY
from helpers.ray_local import ask
from helpers.scheduling import held
from helpers.serving import new_engine
from windfall.cli import serve as serve_command
from windfall.core.errors import InputError
from windfall.engine.engine import Engine
from windfall.engine.host_runner import HostRunner
from windfall.engine.loading import load
from windfall.engine.service import MAX_REQUESTS_CPU, MAX_REQUESTS_GPU
from windfall.ray import metrics as ray_export
from windfall.ray import replica, routing
from windfall.ray.application import completed, deployment
from windfall.ray.options import Options
from windfall.ray.replica import Replica
from windfall.serve.app import make_app
from windfall.serve.health import Unhealthy

PAGE = (DEPLOY.parent / "docs" / "scale-out.md").read_text("utf-8")
CPU = {"device": "cpu"}


def options(**given: Any) -> Options:
    return completed(Options.read({**CPU, **given}, {}))


def test_options_are_read_from_text() -> None:
    made = options(max_requests="4", fast="true", policy_options="depth=4,k=3", request_policies="beam,chain")
    assert (made.max_requests, made.fast) == (4, True)
    assert made.policy_options == {"depth": "4", "k": "3"} and made.request_policies == ("beam", "chain")
    assert made.load["exact"] is False and made.load["policy_options"] == {"depth": "4", "k": "3"}


def test_a_replica_has_the_options_of_the_command_line() -> None:
    known = {each.name for each in fields(Options)}
    server = {"api_key": "api_keys", "request_policy": "request_policies", "no_page": "page"}  # lists, and the opposite
    model = {"drafter_settings": "drafter_options", "settings": "policy_options"}
    ours = {"host", "port", "http_processes", "exact"}  # Ray's proxies answer HTTP; `exact` is the default
    for name, hint in typing.get_type_hints(serve_command.serve).items():
        names = [each.name for each in fields(hint)] if is_dataclass(hint) else [name]
        for each in {*names} - ours - {"return"}:
            assert {**server, **model}.get(each, each) in known, each
    made = options(weights="int8", compile="yes", no_graphs="true", host_policies="1", uncoupled="on").load
    assert (made["weights"], made["compile"], made["host_policies"]) == ("int8", True, True)
    assert (made["graphs"], made["coupled"], made["exact"]) == (False, False, True)
    assert options().load.keys() <= inspect.signature(load).parameters.keys()


def test_a_replica_prepares_before_it_is_ready(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    prepared: list[Engine] = []
    monkeypatch.setattr(Engine, "prepare", lambda self: prepared.append(self))
    made = Replica(options(target=str(folder), policy="none"))
    assert prepared == [made.engine]
    made.__del__()


def test_options_come_from_the_environment_too() -> None:
    environment = {"WINDFALL_RAY_TARGET": "a", "WINDFALL_RAY_POLICY": "none", "WINDFALL_API_KEY": "key", "HOME": "/"}
    made = Options.read({"target": "b"}, environment)
    assert (made.target, made.policy, made.api_keys) == ("b", "none", ("key",)) and "key" not in repr(made)
    assert made.settings.api_keys == ("key",)


def test_the_defaults_fit_an_engine() -> None:
    made = deployment(options())
    assert made["max_ongoing_requests"] == MAX_REQUESTS_CPU + 8 and made["num_replicas"] == 1
    assert deployment(options(gpus=1, device=None))["max_ongoing_requests"] == MAX_REQUESTS_GPU + 8
    assert made["backpressure_config"].status_code == 429 and made["backpressure_config"].retry_after_s > 0
    assert made["max_queued_requests"] > 0 and made["graceful_shutdown_timeout_s"] == 600
    assert made["health_check_timeout_s"] > replica.PROBE_SECONDS
    scaled = deployment(options(min_replicas=2, max_replicas=4, max_requests=8))["autoscaling_config"]
    assert (scaled.min_replicas, scaled.max_replicas, scaled.target_ongoing_requests) == (2, 4, 6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"polcy": "none"}, "there is no option 'polcy'; there are target, device"),
        ({"policy": "nothing"}, "there is no policy 'nothing'"),
        ({"request_policies": "nothing"}, "there is no policy 'nothing'"),
        ({"max_requests": 0}, "max_requests must be a whole number of at least 1, not 0"),
        ({"weights": "int3"}, "weights"),
        ({"max_requests": "many"}, "the option 'max_requests': input should be a valid integer"),
        ({"log_format": "xml"}, "the option 'log_format': input should be 'text', 'json' or 'none', not 'xml'"),
        ({"policy_options": "deep"}, "write settings as name=value, not 'deep'"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas is 2, less than min_replicas, 3"),
        ({"min_replicas": 0}, "needs max_replicas"),
        ({"api_keys": [" "]}, "an API key must not be empty"),
    ],
)
def test_wrong_options_are_refused_in_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(click.UsageError) as found:
        windfall.ray.build({**CPU, **given})
    assert words in found.value.message and "\n" not in found.value.message


def test_the_documents_name_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.name for each in fields(Options) if f"`{each.name}`" not in PAGE] == []
    assert f"{MAX_REQUESTS_CPU} without a GPU, {MAX_REQUESTS_GPU} with one" in PAGE
    (application,) = yaml.safe_load((DEPLOY / "ray.yaml").read_text("utf-8"))["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, getattr(windfall.ray, name)) == ("windfall.ray", windfall.ray.build)
    made = windfall.ray.build(application["args"])._bound_deployment
    assert made.name == "windfall" and made.ray_actor_options["num_gpus"] == 1
    monkeypatch.setenv("WINDFALL_RAY_CPUS", "3")
    assert windfall.ray.app._bound_deployment.ray_actor_options["num_cpus"] == 3


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install windfall\[ray\]"):
        importlib.reload(windfall.ray)


def test_a_replica_answers_as_the_server_does(folder: Path) -> None:
    app = windfall.ray.build({**CPU, "target": str(folder), "policy": "none"})
    handle = serve.run(app, _local_testing_mode=True)
    body = {"prompt": "Hi", "max_tokens": 8, "seed": 3, "ignore_eos": True}
    status, headers, answer = ask(handle, "POST", "/v1/completions", {**body, "stream": True})
    assert status == 200 and "x-request-id" not in headers  # the proxy adds it
    lines = [line.removeprefix("data: ") for line in answer.decode().splitlines() if line]
    assert lines[-1] == "[DONE]" and len(lines) > 3
    text = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
    status, _, answer = ask(handle, "POST", "/v1/completions", body)
    assert status == 200 and json.loads(answer)["choices"][0]["text"] == text
    status, _, answer = ask(handle, "POST", "/v1/completions", {"colour": 1})
    assert status == 400 and json.loads(answer)["error"]["param"] == "prompt"
    for _ in range(2):
        handle.check_health.remote().result(timeout_s=60)


class Recorded:
    """Stands for a metric of Ray."""

    made: ClassVar[dict[str, Recorded]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]):
        assert ":" not in name and description
        self.tag_keys, self.values = tag_keys, Counter[tuple[str, ...]]()
        Recorded.made[name] = self

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[tuple(tags[key] for key in self.tag_keys)] = value  # type: ignore[assignment]


class RecordedCounter(Recorded):
    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self.values[tuple(tags[key] for key in self.tag_keys)] += value  # type: ignore[assignment]


def test_ray_gets_the_metrics_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_export.ray_metrics, "Gauge", Recorded)
    monkeypatch.setattr(ray_export.ray_metrics, "Counter", RecordedCounter)
    made = new_engine()
    metrics = make_app(made).state.metrics
    export = ray_export.RayExport(metrics)
    for texts in (1, 2):
        made.submit([1, 2, 3], max_new_tokens=5, eos=(), policy="none").result(20)
        metrics.add_answer("/v1/models", 200)
        export.export()
        export.export()  # nothing is counted twice
        found = {name: each.values for name, each in Recorded.made.items()}
        assert found["windfall_generation_tokens"] == {("tiny",): 5 * texts}
        assert found["windfall_http_requests"] == {("/v1/models", "200"): texts}
        assert found["windfall_num_requests_running"] == {("tiny",): 0}
        buckets = found["windfall_accepted_length_bucket"]
        assert buckets["tiny", "1.0"] == buckets["tiny", "+Inf"] == found["windfall_accepted_length_count"]["tiny",]
    samples = {sample.name for family in metrics.collect() for sample in family.samples}
    assert {name.removesuffix("_total").replace(":", "_") for name in samples} == Recorded.made.keys()
    made.close()


def of_engine(engine: Any) -> Replica:
    return Replica(options(), engine)


def test_a_replica_closes_its_engine_and_is_then_unhealthy() -> None:
    made = of_engine(new_engine())
    asyncio.run(made.check_health())
    made.__del__()
    assert made.engine.closed
    with pytest.raises(Unhealthy, match="the engine is closed"):
        asyncio.run(made.check_health())


def test_an_engine_that_hangs_is_unhealthy() -> None:
    made = of_engine(new_engine(max_requests=1))
    made.health.hang_seconds = 0.2
    gate, _ = held(made.engine)
    try:
        asyncio.run(made.check_health())
        with pytest.raises(Unhealthy, match="has generated nothing"):
            asyncio.run(made.check_health())
    finally:
        gate.open.set()
    made.health.hang_seconds = 20.0
    asyncio.run(made.check_health())
    made.__del__()


def test_an_engine_that_fails_in_every_pass_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    made = of_engine(new_engine())
    asyncio.run(made.check_health())

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(HostRunner, "round", fail)
    with pytest.raises(Unhealthy, match="the device is lost"):
        asyncio.run(made.check_health())
    made.__del__()


def test_the_key_of_the_replicas_machine_counts_if_no_other_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDFALL_API_KEY", "own")
    made = new_engine()
    assert Replica(options(), made)._settings.api_keys == ("own",)
    assert Replica(options(api_keys="given"), made)._settings.api_keys == ("given",)


def test_requests_without_a_session_go_to_the_less_busy_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hashed:
        async def choose_replicas(self, candidates: list[str], pending: Any = None) -> list[list[str]]:
            return [["owner"], ["next"]]

    router = routing.SessionRouter.__new__(routing.SessionRouter)
    monkeypatch.setattr(routing.ConsistentHashRouter, "choose_replicas", Hashed.choose_replicas)

    def chosen(session: str) -> list[list[str]]:
        pending = SimpleNamespace(metadata=SimpleNamespace(session_id=session))
        return asyncio.run(router.choose_replicas(["a", "b", "c"], pending))

    assert chosen("anna") == [["owner"], ["next"]]
    seen = {tuple(sorted(group)) for _ in range(40) for group in chosen("")}
    assert seen == {("a", "b"), ("a", "c"), ("b", "c")}
