from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from helpers.serving import client, engine, running


@pytest.fixture(scope="package")
def address() -> Iterator[str]:
    with running(engine()) as url:
        yield url


@pytest.fixture(scope="package")
def api(address: str) -> Iterator[openai.OpenAI]:
    with client(address) as made:
        yield made
