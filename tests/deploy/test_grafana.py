"""The Grafana dashboard: its queries are PromQL, and ask for metrics and labels that /metrics really has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.deploy import DEPLOY
from helpers.serving import http, new_engine, running

BOARD = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
OF_PROMETHEUS = {"job", "instance"}  # labels that it adds itself
UNSEEN = {"windfall:budget_rows", "windfall:budget_draft_passes"}  # only present while several requests run


def queries() -> Iterator[tuple[str, str]]:
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "1m"), target["legendFormat"]


@pytest.fixture(scope="module")
def served() -> dict[str, set[str]]:
    """The labels of all samples, by name."""
    made = new_engine()
    with running(made) as url:
        http().post(f"{url}/v1/completions", json={"prompt": "aaaa aaaa", "max_tokens": 12, "temperature": 0})
        text = http().get(f"{url}/metrics").text
    made.close()
    found: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        if family.name in UNSEEN:
            found[family.name] |= {"model_name"}
        for sample in family.samples:
            found[sample.name] |= {*sample.labels}
    return found


def selectors(query: Any) -> Iterator[Any]:
    """The metrics in a parsed query."""
    if isinstance(query, promql_parser.VectorSelector):
        yield query
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs"):
        if (inner := getattr(query, name, None)) is not None:
            yield from selectors(inner)
    for inner in getattr(query, "args", None) or ():
        yield from selectors(inner)


def test_every_query_asks_for_what_is_served(served: dict[str, set[str]]) -> None:
    asked: set[str] = set()
    for query, legend in queries():
        found = list(selectors(promql_parser.parse(query)))
        assert found and len(found) == len(re.findall(r"\b(?:windfall:|process_)", query)), query
        for each in found:
            assert each.name in served, each.name
            labels = {matcher.name for matcher in each.matchers.matchers}
            assert labels <= served[each.name] | OF_PROMETHEUS, query
        grouped = {word for words in re.findall(r"by \(([^)]*)\)", query) for word in words.split(", ")}
        used = {*re.findall(r"\{\{(\w+)\}\}", legend), *grouped}
        assert used <= set().union(*(served[each.name] for each in found)) | OF_PROMETHEUS, (query, legend)
        asked |= {each.name for each in found}
    assert len(asked) > 20


def test_no_metric_of_the_model_is_left_out(served: dict[str, set[str]]) -> None:
    asked = {each.name for query, _ in queries() for each in selectors(promql_parser.parse(query))}
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    own = {re.sub(r"_(bucket|sum|count)$", "", name) for name in served if name.startswith("windfall:")}
    assert own - stems == {"windfall:num_draft_tokens_total", "windfall:num_accepted_tokens_total"}


def test_variables_and_places() -> None:
    variables = {each["name"] for each in BOARD["templating"]["list"]}
    used = {*re.findall(r"\$\{?([a-z]+)\b", json.dumps(BOARD["panels"]))}
    assert used == variables
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len({*places}) == len(places) and all(panel["title"] for panel in BOARD["panels"])
    for each in BOARD["templating"]["list"][1:]:
        assert re.fullmatch(r"label_values\(windfall:num_requests_running, \w+\)", each["query"])
