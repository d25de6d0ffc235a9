"""Fields that other servers have, too: what is accepted without being supported, and what is refused."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from helpers.serving import MODEL, engine, http
from windfall.serve.neutral import CHAT, COMPLETIONS, IGNORED, STREAM

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 6, "seed": 3},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 6, "seed": 3},
}
OTHERS: dict[str, Any] = {  # values that ask for something
    "store": True,
    "modalities": ["text", "audio"],
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "verbosity": "low",
    "documents": [{"text": "a"}],
    "mm_processor_kwargs": {"a": 1},
    "bad_words": ["a"],
    "logits_processors": ["a"],
    "suffix": "end",
    "logprobs": 30,
    "best_of": 2,
    "length_penalty": 0.5,
    "min_tokens": 3,
    "priority": 1,
}
NEVER: dict[str, Any] = {  # fields without a neutral value
    "reasoning_effort": "low",
    "web_search_options": {},
    "audio": {"voice": "a", "format": "wav"},
    "moderation": {},
    "cache_salt": "a",
    "truncate_prompt_tokens": 5,
    "allowed_token_ids": [1],
    "chat_template": "{{ messages }}",
}
NEUTRAL = [
    (path, field, value)
    for path, fields in zip(BODIES, (CHAT, COMPLETIONS), strict=True)
    for field, values in fields.items()
    for value in values
]


def answer_of(address: str, path: str, **more: Any) -> Any:
    return http().post(address + path, json={**BODIES[path], **more})


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize(("path", "field", "value"), NEUTRAL)
def test_a_neutral_value_changes_nothing(address: str, path: str, field: str, value: Any) -> None:
    assert text_of(answer_of(address, path, **{field: value})) == text_of(answer_of(address, path))
    assert answer_of(address, path, **{field: None}).status_code == 200


@pytest.mark.parametrize(("path", "field", "value"), NEUTRAL)
def test_any_other_value_is_refused(address: str, path: str, field: str, value: Any) -> None:
    other = not value if isinstance(value, bool) else OTHERS[field]
    if path.endswith("chat/completions") or field not in ("echo", "logprobs"):
        assert answer_of(address, path, **{field: other}).json()["error"]["param"] == field
    if not isinstance(value, bool) and value in (0, 1):
        assert answer_of(address, path, **{field: bool(value)}).status_code == 400  # true is not 1


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", IGNORED)
def test_ignored_fields(address: str, path: str, field: str) -> None:
    for value in ("a", {"a": 1}, 3):
        assert text_of(answer_of(address, path, **{field: value})) == text_of(answer_of(address, path))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", NEVER)
def test_fields_that_are_never_neutral(address: str, path: str, field: str) -> None:
    answer = answer_of(address, path, **{field: NEVER[field]})
    assert answer.status_code == 400
    assert answer.json()["error"] | {"type": ""} == {
        "message": f"'{field}' is not supported",
        "type": "",
        "param": field,
        "code": "unsupported_parameter",
    }


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", STREAM)
def test_options_of_streams(address: str, path: str, field: str) -> None:
    accepted = answer_of(address, path, stream=True, stream_options={field: False, "include_usage": True})
    assert accepted.status_code == 200 and '"usage":{' in accepted.text
    refused = answer_of(address, path, stream=True, stream_options={field: True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == f"stream_options.{field}"


def test_what_the_official_client_may_send(api: openai.OpenAI) -> None:
    how: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "seed": 3}
    more: dict[str, Any] = {
        "store": False,
        "modalities": ["text"],
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "logit_bias": {},
        "functions": [],
        "function_call": "auto",
        "tools": [],
        "metadata": {"a": "b"},
        "prediction": {"type": "content", "content": "Hi"},
        "prompt_cache_retention": "24h",
        "stop": None,
        "response_format": {"type": "text"},
        "verbosity": "medium",
    }
    assert (
        api.chat.completions.create(**how, **more).choices[0].message.content
        == api.chat.completions.create(**how).choices[0].message.content
    )


# ---- contents of messages


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "image_url"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio"),
        ({"type": "file", "file": {"file_id": "a"}}, "file"),
        ({"type": "refusal", "refusal": "No."}, "refusal"),
        ({"type": "video_url", "video_url": {"url": ""}}, "video_url"),
        ({"type": "<script>"}, "another"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_parts_that_are_not_text(address: str, path: str, part: dict[str, Any], kind: str) -> None:
    content = [{"type": "text", "text": "Hi"}, part]
    messages = [{"role": "system", "content": "Hi"}, {"role": "user", "content": content}]
    answer = http().post(address + path, json={"messages": messages})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages.1.content.1.type"
    words = f"content of type {kind} is not supported; this server takes text"
    assert error["message"] == f"'messages.1.content.1.type': {words}"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (3, "messages.0.content"),
        ([3], "messages.0.content.0"),
        ([{"type": "text"}], "messages.0.content.0.text"),
        ([{"type": "text", "text": "Hi", "colour": 1}], "messages.0.content.0.colour"),
        ([{"text": "Hi"}], "messages.0.content.0.type"),
    ],
)
def test_wrong_contents(address: str, content: Any, param: str) -> None:
    answer = answer_of(address, "/v1/chat/completions", messages=[{"role": "user", "content": content}])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


# ---- variables of the chat template

THINKING = "{% if enable_thinking %}Think{% else %}{{ messages[0].content }}{% endif %}"


def test_variables_of_the_chat_template(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine().target.tokenizer, "chat_template", THINKING)
    path = "/v1/chat/completions"
    thinking = answer_of(address, path, chat_template_kwargs={"enable_thinking": True})
    assert thinking.json()["usage"]["prompt_tokens"] == len("Think")
    assert text_of(thinking) == text_of(answer_of(address, "/v1/completions", prompt="Think"))
    for given in ({"enable_thinking": False}, {}, {"unknown": 1}):
        assert answer_of(address, path, chat_template_kwargs=given).json()["usage"]["prompt_tokens"] == len("Hi")
    body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": True}}
    assert http().post(f"{address}/tokenize", json=body).json()["count"] == len("Think")
    assert http().post(f"{address}/tokenize", json={**body, "messages": None, "prompt": "a"}).status_code == 400


@pytest.mark.parametrize(
    "name", ["messages", "conversation", "tools", "chat_template", "tokenize", "add_generation_prompt", "self"]
)
def test_what_variables_must_not_replace(address: str, name: str) -> None:
    answer = answer_of(address, "/v1/chat/completions", chat_template_kwargs={name: "a"})
    words = f"chat_template_kwargs cannot set '{name}'"
    assert answer.status_code == 400 and answer.json()["error"]["message"] == words


@pytest.mark.parametrize("template", ["{{ 3 + size }}", "{{ size.upper() }}", "{{ raise_exception('no') }}"])
def test_variables_that_a_template_cannot_use(address: str, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(engine().target.tokenizer, "chat_template", template)
    answer = answer_of(address, "/v1/chat/completions", chat_template_kwargs={"size": [1]})
    assert answer.status_code == 400 and "template" in answer.json()["error"]["message"]


# ---- tokens


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("ids", [[-1], [5, 61], [2**40], [1.5], ["5"], [True]])
def test_stop_tokens_must_be_tokens(address: str, path: str, ids: list[Any]) -> None:
    answer = answer_of(address, path, stop_token_ids=ids)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("stop_token_ids")
    assert answer_of(address, path, stop_token_ids=[0, 60]).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_the_same_token_twice_in_a_bias(address: str, path: str) -> None:
    answer = answer_of(address, path, logit_bias={"5": 1, "05": 2})
    assert answer.status_code == 400 and "the same token id" in answer.json()["error"]["message"]
    assert text_of(answer_of(address, path, logit_bias={})) == text_of(answer_of(address, path))


# ---- the prompt alone


@pytest.mark.parametrize("prompt", ["Name a river.", [9, 8, 7, 6]])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_echo_without_new_tokens(address: str, api: openai.OpenAI, prompt: Any, stream: bool, logprobs: Any) -> None:
    """The prompt and its log-probabilities are those of a longer answer."""
    how: dict[str, Any] = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": logprobs, "seed": 3}
    (longer,) = api.completions.create(max_tokens=4, extra_body={"ignore_eos": True}, **how).choices
    ids = engine().encode(prompt, raw=True)
    text = engine().target.tokenizer.decode(ids, skip_special_tokens=True)
    body = {**how, "max_tokens": 0, "stop": "a", "extra_body": {"return_token_ids": True}}
    if stream:
        chunks = list(api.completions.create(stream=True, **body))
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(choice.text for choice in choices) == text and choices[-1].finish_reason == "length"
        found = next((choice.logprobs for choice in choices if choice.logprobs), None)
    else:
        answer = api.completions.create(**body)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.model_dump()["token_ids"]) == (text, "length", [])
        assert answer.usage is not None
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(ids), 0, len(ids))
        found = choice.logprobs
    if logprobs is None:
        assert found is None
    else:
        assert found is not None and longer.logprobs is not None
        count = len(ids)
        assert found.tokens == longer.logprobs.tokens[:count] and found.token_logprobs[0] is None
        assert found.token_logprobs[1:] == pytest.approx(longer.logprobs.token_logprobs[1:count], abs=1e-5)
        assert found.text_offset == longer.logprobs.text_offset[:count]
        assert len(found.top_logprobs) == count


def test_no_new_tokens_without_echo(address: str) -> None:
    for body in ({"max_tokens": 0}, {"max_tokens": 0, "echo": False, "logprobs": 1}):
        answer = answer_of(address, "/v1/completions", **body)
        assert answer.status_code == 400 and "max_tokens 0 needs echo" in answer.json()["error"]["message"]
    assert answer_of(address, "/v1/chat/completions", max_tokens=0).status_code == 400


def test_several_prompts_alone(address: str) -> None:
    answer = answer_of(address, "/v1/completions", prompt=["Hi", "Name"], n=2, echo=True, max_tokens=0)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["Hi", "Hi", "Name", "Name"]
