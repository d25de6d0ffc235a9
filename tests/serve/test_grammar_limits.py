"""Schemas that take long to compile: refused after a limit, while other requests go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from helpers.grammars import SLOW_SCHEMA
from helpers.serving import MODEL, http, running
from helpers.tools import engine
from windfall.core.constraint import MAX_SOURCE_CHARACTERS
from windfall.core.errors import InputError
from windfall.serve.settings import Settings

LIMIT = 3.0  # seconds


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running(engine(), Settings(grammar_timeout=LIMIT, max_grammar_chars=90_000, max_queue=16)) as url:
        yield url


def ask(address: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": "a cab", "max_tokens": 4, **fields}
    with httpx.Client(timeout=60) as own:
        return own.post(f"{address}/v1/completions", json=body)


def test_other_requests_go_on_while_slow_schemas_are_refused(address: str) -> None:
    assert ask(address, regex="[ab]+").status_code == 200  # starts the first process
    slow = [{**SLOW_SCHEMA, "title": str(number)} for number in range(6)]
    with ThreadPoolExecutor(6) as threads:
        waiting = [threads.submit(ask, address, guided_json=schema) for schema in slow]
        time.sleep(0.3)
        for fields in ({}, {"regex": "[ab]+"}):  # a text, and a grammar that is known
            assert ask(address, **fields).status_code == 200
            assert not all(each.done() for each in waiting)
        answers = [each.result() for each in waiting]
    assert {answer.status_code for answer in answers} == {400, 429}
    for answer in answers:
        words = f"takes more than {LIMIT:g} seconds" if answer.status_code == 400 else "too many other grammars"
        assert words in answer.json()["error"]["message"]
    assert ask(address, regex="[abc]+").status_code == 200
    assert http().get(f"{address}/ready").json() == {"status": "ready", "running": 0, "waiting": 0}


def test_a_schema_that_is_too_long_is_refused(address: str) -> None:
    answer = ask(address, regex="a" * 90_001)
    assert answer.status_code == 400
    assert "has 90000 characters at most here, not 90001" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "wrong", [{"grammar_timeout": 0}, {"max_grammar_chars": 0}, {"max_grammar_chars": MAX_SOURCE_CHARACTERS + 1}]
)
def test_wrong_limits_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Settings(**wrong)
