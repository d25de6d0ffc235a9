"""The files of the live page, and the figures that it asks for."""

from __future__ import annotations

import logging
import re

import pytest

from helpers.serving import MODEL, Serving, drafting_engine, engine, http, new_engine, running
from windfall.serve.live_page import FILES, PAGE_PATHS
from windfall.serve.settings import Settings


def test_the_page_and_its_parts_are_served(address: str) -> None:
    index = http().get(f"{address}/")
    assert index.status_code == 200 and index.headers["content-type"].startswith("text/html")
    policy = index.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    linked = re.findall(r'(?:href|src)="(page/[^"]+)"', index.text)
    imported = re.findall(r'from "\./([^"]+)"', "".join(body.decode() for body in FILES.values()))
    assert {*linked} | {f"page/{name}" for name in imported} == {f"page/{name}" for name in FILES} - {"page/index.html"}
    for path in PAGE_PATHS[1:]:
        answer = http().get(address + path)
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for name, body in FILES.items():
        addresses = {*re.findall(r"https?://[^\"'\s>)]+", body.decode())}
        assert addresses <= {"http://www.w3.org/2000/svg"}, name


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/../app.py", "/page/%2e%2e/app.py", "/page/"])
def test_other_files_are_not_served(address: str, path: str) -> None:
    assert http().get(address + path).status_code == 404


def test_without_the_page() -> None:
    with running(engine(), Settings(page=False)) as url:
        assert {http().get(url + path).status_code for path in ("/", "/page/app.js", "/live")} == {404}
        assert http().get(f"{url}/v1/models").status_code == 200


def test_the_page_needs_no_key_and_its_figures_do() -> None:
    with running(engine(), Settings(api_keys=("secret",))) as url:
        assert {http().get(url + path).status_code for path in PAGE_PATHS} == {200}
        assert http().get(f"{url}/live").status_code == 401
        assert http().get(f"{url}/live", headers={"Authorization": "Bearer secret"}).status_code == 200
        assert "secret" not in http().get(f"{url}/").text


def test_the_page_is_logged_once_and_its_questions_are_not(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "windfall.serve.request_log"):
        for path in (*PAGE_PATHS, "/live", "/live"):
            assert http().get(address + path).status_code == 200
    assert [record.message.split()[:3] for record in caplog.records] == [["GET", "/", "200"]]


def test_the_figures_of_an_idle_server(serving: Serving) -> None:
    made = new_engine()
    with serving(made, Settings(model_name="mine", max_queue=7)) as url:
        live = http().get(f"{url}/live").json()
    about = live["about"]
    assert (about["model"], about["drafter"], about["policy"]) == ("mine", "ngram", "chain")
    assert (about["max_requests"], about["max_queue"], about["policies"], about["chat"]) == (4, 7, ["none"], True)
    assert (live["running"], live["waiting"], live["budget"]) == (0, 0, None)
    assert set(live["totals"].values()) == {0}
    made.close()


def test_the_figures_count_texts_rows_and_tokens(serving: Serving) -> None:
    with serving(drafting_engine()) as url:
        before = http().get(f"{url}/live").json()["totals"]
        body = {"prompt": ["Name a", "A long river"], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        used = http().post(f"{url}/v1/completions", json=body).json()["usage"]["speculation"]
        live = http().get(f"{url}/live").json()
    grown = {name: value - before[name] for name, value in live["totals"].items()}
    assert grown["tokens"] == 24
    assert grown["texts"] == used["target_passes"]
    assert grown["rows"] == used["verified_tokens"] + used["target_passes"]
    assert 0 < grown["rounds"] <= grown["texts"] and grown["draft_passes"] > 0
    assert live["about"]["model"] == MODEL and live["running"] == 0
