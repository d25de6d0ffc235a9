"""Other clients of OpenAI's API: langchain-openai and litellm. They are large, and not part of the extra `dev`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from helpers.grammars import SCHEMA
from helpers.serving import MODEL, running
from helpers.tools import TOOLS, engine

MESSAGES: Any = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Hi"}]
LIMIT, SEED = 12, 5
MISSING = "{name} is not installed: pip install {name}"


@pytest.fixture(scope="module")
def text(api: openai.OpenAI) -> str:
    """What the other clients should get."""
    done = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=LIMIT, seed=SEED, temperature=1)
    return done.choices[0].message.content or ""


@pytest.fixture(scope="module")
def chat_openai(address: str) -> Any:
    reason = MISSING.format(name="langchain-openai")
    made = pytest.importorskip("langchain_openai", reason=reason).ChatOpenAI
    how = {"max_retries": 0, "max_tokens": LIMIT, "seed": SEED, "temperature": 1}
    return made(model=MODEL, base_url=f"{address}/v1", api_key="none", **how)


@pytest.fixture(scope="module")
def litellm() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network
        yield pytest.importorskip("litellm", reason=MISSING.format(name="litellm"))


def test_langchain_chats(chat_openai: Any, text: str) -> None:
    answer = chat_openai.invoke([("system", "Answer."), ("human", "Hi")])
    assert answer.content == text and answer.response_metadata["finish_reason"] in ("stop", "length")
    assert 0 < answer.usage_metadata["output_tokens"] <= LIMIT


def test_langchain_streams(chat_openai: Any, text: str) -> None:
    pieces = list(chat_openai.stream([("system", "Answer."), ("human", "Hi")], stream_usage=True))
    assert "".join(piece.content for piece in pieces) == text and len(pieces) > 3
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) > 0


def test_langchain_gets_logprobs_and_answers_in_batches(chat_openai: Any, text: str) -> None:
    told = chat_openai.bind(logprobs=True, top_logprobs=2)
    one, other = told.batch([[("system", "Answer."), ("human", "Hi")], [("human", "Hello")]])
    assert one.content == text and other.content != text
    assert all(len(each["top_logprobs"]) == 2 for each in one.response_metadata["logprobs"]["content"])


@pytest.fixture(scope="module")
def tool_address() -> Iterator[str]:
    with running(engine()) as url:
        yield url


def test_langchain_calls_tools_and_gets_json(tool_address: str, chat_openai: Any) -> None:
    """A random model calls a tool if it must."""
    how = {"openai_api_base": f"{tool_address}/v1", "max_tokens": 120, "seed": 4}
    made = type(chat_openai)(model=MODEL, api_key="none", max_retries=0, **how)
    (call,) = made.bind_tools(TOOLS[:1], tool_choice="required", parallel_tool_calls=False).invoke("a cab").tool_calls
    assert call["name"] == "find" and 0 <= call["args"]["id"] <= 99
    assert made.with_structured_output(SCHEMA | {"title": "person"}, method="json_schema").invoke("a cab")["age"] >= 0


def ask(litellm: Any, address: str, **more: Any) -> Any:
    how = {"api_base": f"{address}/v1", "api_key": "none", "max_retries": 0, "num_retries": 0, "max_tokens": LIMIT}
    return litellm.completion(model=f"openai/{MODEL}", messages=MESSAGES, seed=SEED, temperature=1, **{**how, **more})


def test_litellm_chats(litellm: Any, address: str, text: str) -> None:
    answer = ask(litellm, address)
    assert answer.choices[0].message.content == text and 0 < answer.usage.completion_tokens <= LIMIT


def test_litellm_streams(litellm: Any, address: str, text: str) -> None:
    chunks = list(ask(litellm, address, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text


def test_litellm_names_the_error(litellm: Any, address: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="colour"):
        ask(litellm, address, extra_body={"colour": "blue"})
