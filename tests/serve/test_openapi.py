"""The description of the server: it is true, and no request that is made from it gives a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings, strategies
from pydantic import BaseModel, ValidationError
from schemathesis import checks
from schemathesis.generation import GenerationMode

from helpers.serving import MODEL, engine, http, new_engine, running
from windfall.serve.app import make_app
from windfall.serve.openapi import accepted
from windfall.serve.protocol import ChatRequest, CompletionRequest
from windfall.serve.settings import Settings

EXAMPLES = 60
MESSAGES = [{"role": "user", "content": "Hi"}]
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


@pytest.fixture(scope="module")
def described() -> Iterator[Any]:
    """The description of a server with short texts and a short queue."""
    made = new_engine()
    app = make_app(made, Settings(max_queue=4, request_timeout=0.3))
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    made.close()


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_requests_made_from_the_description(described: Any, mode: GenerationMode) -> None:
    """Right requests, and wrong ones, to all routes."""

    @seed(1)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=strategies.one_of(each.as_strategy(generation_mode=mode) for each in _operations(described, mode)))
    def check(case: Any) -> None:
        case.call_and_validate(checks=CHECKS)

    check()


def _operations(described: Any, mode: GenerationMode) -> list[Any]:
    """The routes; only those with a body can be asked wrongly."""
    found = [each.ok() for each in described.get_all_operations()]
    return [each for each in found if mode is GenerationMode.POSITIVE or each.method == "post"]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ChatRequest, {"messages": MESSAGES}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None}]}),
        (ChatRequest, {"messages": MESSAGES, "temperature": None, "stop": None, "seed": None}),
        (ChatRequest, {"messages": MESSAGES, "stop": "a", "user": 3, "metadata": {}, "tool_choice": "none"}),
        (ChatRequest, {"messages": MESSAGES, "stop": ["a", "b"], "logit_bias": {"42": 1.5}, "stream": True}),
        (ChatRequest, {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": None}}),
        (ChatRequest, {"messages": None}),
        (ChatRequest, {"messages": []}),
        (ChatRequest, {"messages": [{"role": "user"}]}),
        (ChatRequest, {"messages": MESSAGES, "colour": "blue"}),
        (ChatRequest, {"messages": MESSAGES, "temperature": "hot"}),
        (ChatRequest, {"messages": MESSAGES, "temperature": -1}),
        (ChatRequest, {"messages": MESSAGES, "stop": ""}),
        (ChatRequest, {"messages": MESSAGES, "stop": ["a"] * 17}),
        (ChatRequest, {"messages": MESSAGES, "logit_bias": {"a": 1}}),
        (ChatRequest, {"messages": MESSAGES, "best_of": 2}),
        (CompletionRequest, {"prompt": "Hi"}),
        (CompletionRequest, {"prompt": ["Hi", "you"], "best_of": 1, "echo": None}),
        (CompletionRequest, {"prompt": [1, 2]}),
        (CompletionRequest, {"prompt": [[1, 2], [3]]}),
        (CompletionRequest, {"prompt": None}),
        (CompletionRequest, {"prompt": []}),
        (CompletionRequest, {"prompt": ["Hi", 3]}),
        (CompletionRequest, {"prompt": [-1]}),
        (CompletionRequest, {"prompt": "Hi", "messages": MESSAGES}),
    ],
)
def test_the_schema_takes_what_the_server_takes(kind: type[BaseModel], fields: dict[str, Any]) -> None:
    schema = accepted(kind)
    whole = {**schema, "components": {"schemas": schema.get("$defs", {})}}
    try:
        kind.model_validate(fields)
        taken = True
    except ValidationError:
        taken = False
    assert jsonschema.Draft202012Validator(whole).is_valid(fields) == taken


def test_the_description_lists_errors_and_keys() -> None:
    open_app, closed = make_app(engine()).openapi(), make_app(engine(), Settings(api_keys=("a",))).openapi()
    answers = open_app["paths"]["/v1/completions"]["post"]["responses"]
    assert {*answers} == {"200", "400", "404", "413", "415", "429", "500", "503"}
    assert "text/event-stream" in answers["200"]["content"]
    assert "401" in closed["paths"]["/v1/completions"]["post"]["responses"] and closed["security"] == [{"key": []}]
    assert {*open_app["paths"]} >= {"/v1/models", "/v1/chat/completions", "/health", "/ready", "/metrics"}


def test_every_route_that_takes_a_body_describes_it() -> None:
    operations = [path["post"] for path in make_app(engine()).openapi()["paths"].values() if "post" in path]
    assert len(operations) >= 2 and all("requestBody" in each for each in operations)


def test_the_description_is_served_and_no_page_with_foreign_scripts(address: str) -> None:
    assert MODEL and http().get(f"{address}/openapi.json").json()["openapi"].startswith("3.1")
    assert http().get(f"{address}/docs").status_code == http().get(f"{address}/redoc").status_code == 404
    with running(engine(), Settings(api_keys=("a",))) as url:
        assert http().get(f"{url}/openapi.json").status_code == 401
