from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from helpers.serving import Serving, client, engine, running, running_apart

WAYS: dict[str, Serving] = {"same process": running, "HTTP process": running_apart}


@pytest.fixture(scope="package", params=WAYS)
def serving(request: pytest.FixtureRequest) -> Serving:
    """Serves an engine: from its own process, and over the messages of an HTTP process."""
    return WAYS[request.param]


@pytest.fixture(scope="package")
def address(serving: Serving) -> Iterator[str]:
    with serving(engine()) as url:
        yield url


@pytest.fixture(scope="package")
def api(address: str) -> Iterator[openai.OpenAI]:
    with client(address) as made:
        yield made
