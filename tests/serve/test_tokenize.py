"""/tokenize and /detokenize, in the shapes of vLLM."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from helpers.cli import SPECIAL
from helpers.serving import MODEL, engine, http

MESSAGES = [{"role": "user", "content": "Name a river."}]


def post(address: str, path: str, **body: Any) -> httpx.Response:
    return http().post(f"{address}/{path}", json=body)


def test_a_text_there_and_back(address: str) -> None:
    answer = post(address, "tokenize", model=MODEL, prompt="Name a river.").json()
    ids = engine().encode("Name a river.", raw=True)
    context = engine().target.context
    assert answer == {"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": None}
    assert post(address, "detokenize", model=MODEL, tokens=ids).json() == {"prompt": "Name a river."}
    assert post(address, "tokenize", prompt="Hi", return_token_strs=True).json()["token_strs"] == ["H", "i"]
    assert post(address, "tokenize", prompt="a" * 500).json()["count"] == 500  # more than the context has
    assert post(address, "tokenize", prompt="").json()["count"] == 0
    assert post(address, "detokenize", tokens=[]).json() == {"prompt": ""}


def test_messages_go_through_the_chat_template(address: str) -> None:
    ids = engine().encode(MESSAGES)
    assert post(address, "tokenize", messages=MESSAGES).json()["tokens"] == ids
    without = post(address, "tokenize", messages=MESSAGES, add_generation_prompt=False).json()["tokens"]
    assert without == ids[:-1] and ids[-1] == SPECIAL.index("<|assistant|>")
    text = post(address, "detokenize", tokens=ids).json()["prompt"]
    assert text == "<|user|>Name a river.<|end|><|assistant|>"  # special tokens too


def shown(address: str, **body: Any) -> str:
    """The prompt that the model sees."""
    return post(address, "detokenize", tokens=post(address, "tokenize", **body).json()["tokens"]).json()["prompt"]


def test_tools_are_shown_by_the_chat_template(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "function": {"name": "find"}}]
    refused = post(address, "tokenize", messages=MESSAGES, tools=tools)
    assert refused.status_code == 400 and "does not show tools to the model" in refused.json()["error"]["message"]
    monkeypatch.setattr(engine().target.tokenizer, "chat_template", "{{ tools[0].function.name }}")
    assert shown(address, messages=MESSAGES, tools=tools) == "find"


def test_developers_are_the_system_unless_the_template_knows_them(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"messages": [{"role": "developer", "content": "Hi"}], "add_generation_prompt": False}
    assert shown(address, **told) == "<|system|>Hi<|end|>"
    template = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    monkeypatch.setattr(engine().target.tokenizer, "chat_template", template)
    assert shown(address, **told) == "yes"


@pytest.fixture
def _with_beginning() -> Any:
    """The tokenizer adds a special token before each text."""
    from tokenizers.processors import TemplateProcessing

    backend = engine().target.tokenizer.backend_tokenizer
    kept = backend.post_processor
    backend.post_processor = TemplateProcessing("<|system|> $A", special_tokens=[("<|system|>", 1)])
    yield
    backend.post_processor = kept


@pytest.mark.usefixtures("_with_beginning")
def test_special_tokens(address: str) -> None:
    def ids(**body: Any) -> list[int]:
        return post(address, "tokenize", **body).json()["tokens"]

    plain = ids(prompt="Hi", add_special_tokens=False)
    assert ids(prompt="Hi") == ids(prompt="Hi", add_special_tokens=True) == [1, *plain] and len(plain) == 2
    chat = ids(messages=MESSAGES)
    assert ids(messages=MESSAGES, add_special_tokens=False) == chat and chat[0] == 2
    assert ids(messages=MESSAGES, add_special_tokens=True) == [1, *chat]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("tokenize", {}, "give 'prompt' or 'messages'"),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, "not both"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt needs messages"),
        ("tokenize", {"prompt": "a", "tools": []}, "tools needs messages"),
        ("tokenize", {"prompt": ["a"]}, "'prompt'"),
        ("tokenize", {"messages": []}, "'messages'"),
        ("tokenize", {"prompt": "a", "colour": "blue"}, "'colour' is not supported"),
        ("detokenize", {}, "'tokens' is required"),
        ("detokenize", {"tokens": [1, -1]}, "token ids must be between 0 and 60"),
        ("detokenize", {"tokens": [61]}, "token ids must be between 0 and 60"),
        ("detokenize", {"tokens": "Hi"}, "'tokens'"),
    ],
)
def test_wrong_requests(address: str, path: str, body: dict[str, Any], words: str) -> None:
    answer = post(address, path, **body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_another_model(address: str) -> None:
    answer = post(address, "tokenize", prompt="a", model="other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
