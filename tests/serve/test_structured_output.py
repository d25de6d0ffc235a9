"""Structured output and tools through the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from helpers.grammars import SCHEMA
from helpers.serving import MODEL, client, http, running
from helpers.tools import TEMPLATE, TOOLS, engine

MESSAGES: list[Any] = [{"role": "user", "content": "a cab"}]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running(engine()) as url:
        yield url


@pytest.fixture(scope="module")
def api(address: str) -> Iterator[openai.OpenAI]:
    with client(address) as made:
        yield made


def chat(api: openai.OpenAI, **how: Any) -> Any:
    return api.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 120, "seed": 4, **how})


# ---- response_format and its relatives


@pytest.mark.parametrize("strict", [True, False])
def test_an_answer_follows_a_json_schema(api: openai.OpenAI, strict: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": strict}}
    answer = chat(api, response_format=wanted).choices[0]
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    assert answer.finish_reason == "stop"
    alone = engine().generate(MESSAGES, json_schema=SCHEMA, max_new_tokens=120, seed=4, temperature=1.0)
    assert answer.message.content == alone.text


def test_the_client_parses_models(api: openai.OpenAI) -> None:
    class Person(pydantic.BaseModel):
        kind: Literal["a", "b"]
        old: bool

    how: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 80, "seed": 1}
    parsed = api.chat.completions.parse(response_format=Person, **how)
    assert isinstance(parsed.choices[0].message.parsed, Person)


def test_any_object(api: openai.OpenAI) -> None:
    answer = chat(api, response_format={"type": "json_object"}, max_tokens=60).choices[0]
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "ab{2,4}c"}, "ab{2,4}c"),
        ({"ebnf": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
        ({"guided_regex": "a{3}"}, "a{3}"),
        ({"guided_choice": ["cab", "dad"]}, "cab|dad"),
        ({"guided_grammar": 'root ::= "lol"'}, "lol"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"structured_outputs": {"choice": ["cab"]}}, "cab"),
        ({"structured_outputs": {"json": {"const": "a"}}}, '"a"'),
        ({"structured_outputs": {"regex": "b"}}, "b"),
        ({"structured_outputs": {"grammar": 'root ::= "b"'}}, "b"),
    ],
)
def test_other_fields_in_completions(api: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    answer = api.completions.create(model=MODEL, prompt="a cab", seed=2, extra_body=fields).choices[0]
    assert re.fullmatch(pattern, answer.text) and answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "give the schema as"),
        ({"response_format": {"type": "json_object", "size": 3}}, "response_format.size", "not supported"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no"}}}},
            None,
            'the JSON schema cannot be used: xgrammar: Unsupported type "no"',
        ),
        ({"regex": "["}, None, "the regular expression cannot be used"),
        ({"regex": ""}, None, "regex takes a text that is not empty"),
        ({"ebnf": "root ::= x"}, None, "the grammar cannot be used"),
        ({"regex": "a", "guided_regex": "b"}, None, "regex and guided_regex both ask"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, None, "two tools have the same name"),
        ({"tool_choice": "required"}, None, "needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, None, "not among the tools"),
        ({"tools": TOOLS, "regex": "a"}, None, "tools and structured output"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "["}}]}]},
            "messages.0.tool_calls.0.function.arguments",
            "JSON object",
        ),
    ],
)
def test_wrong_fields(address: str, change: dict[str, Any], param: str | None, words: str) -> None:
    answer = http().post(f"{address}/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, **change})
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"] and "\n" not in error["message"]
    assert error["param"] == param


# ---- tools


def check(call: Any) -> None:
    (schema,) = [tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == call.function.name]
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, schema) if schema else None
    assert schema or arguments == {}


def test_a_required_call(api: openai.OpenAI) -> None:
    answer = chat(api, tools=TOOLS, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    check(call)


def test_a_named_call_and_its_result(api: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "find"}}
    answer = chat(api, tools=TOOLS, tool_choice=named).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "find" and call.id
    check(call)
    more = [*MESSAGES, answer.message.model_dump(exclude_none=True)]
    more.append({"role": "tool", "tool_call_id": call.id, "content": "12"})
    again = chat(api, messages=more, tools=TOOLS, tool_choice="none", max_tokens=5).choices[0]
    assert again.message.tool_calls is None and again.message.content


def test_a_named_tool_is_called_several_times_only_if_asked(api: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": TOOLS[1]["function"]["name"]}}
    how: dict[str, Any] = {"tools": TOOLS, "tool_choice": named, "extra_body": {"ignore_eos": True}}
    once, several = (chat(api, **how, **more).choices[0] for more in ({}, {"parallel_tool_calls": True}))
    assert len(once.message.tool_calls) == 1 < len(several.message.tool_calls)
    assert once.finish_reason == "tool_calls"


def test_tools_that_may_not_be_called_are_not_shown(api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = chat(api, max_tokens=12)
    hidden = chat(api, tools=TOOLS, tool_choice="none", max_tokens=12)
    assert hidden.choices[0].message == plain.choices[0].message
    assert hidden.usage.prompt_tokens == plain.usage.prompt_tokens
    monkeypatch.setattr(engine().target.tokenizer, "chat_template", "{{ messages[0].content }}")
    assert chat(api, tools=TOOLS, tool_choice="none", max_tokens=12).choices[0].message.content


def test_several_calls_in_a_stream(api: openai.OpenAI) -> None:
    how: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "seed": 10, "logit_bias": {"3": 3.0}}
    whole = chat(api, **how).choices[0]
    calls: dict[int, list[str]] = {}
    reasons = []
    for chunk in chat(api, **how, stream=True):
        choice = chunk.choices[0]
        reasons.append(choice.finish_reason)
        assert not choice.delta.content
        for part in choice.delta.tool_calls or []:
            if part.index not in calls:
                assert part.id and part.type == "function" and part.function.arguments == ""
                calls[part.index] = [part.function.name]
            else:
                assert part.id is part.type is part.function.name is None
                calls[part.index].append(part.function.arguments)
    found = [(name, "".join(pieces)) for name, *pieces in calls.values()]
    assert found == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert len(calls) > 1 and reasons[-1] == whole.finish_reason == "tool_calls" and {*reasons[:-1]} == {None}
    for call in whole.message.tool_calls:
        check(call)


@pytest.mark.parametrize("shown", ["<tool_call>", "<tool_call>[", "[TOOL_CALLS]", '{"name": , "parameters": }'])
def test_the_client_puts_streamed_calls_together(
    api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    template = TEMPLATE.replace("<tool_call>", f"{{{{ {shown!r} }}}}")
    monkeypatch.setattr(engine().target.tokenizer, "chat_template", template)
    how: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 3, "max_tokens": 200}
    how |= {"tools": TOOLS[:1], "tool_choice": "required", "extra_body": {"return_token_ids": True}}
    whole = api.chat.completions.create(**how).choices[0]
    with api.chat.completions.stream(**how) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.current_completion_snapshot.choices[0]
    calls = [(call.function.name, call.function.arguments) for call in final.message.tool_calls or []]
    assert calls == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert final.finish_reason == whole.finish_reason and len(pieces) > len(calls) > 0


def test_calls_with_log_probabilities(api: openai.OpenAI) -> None:
    how: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "logprobs": True}
    whole = chat(api, **how).choices[0]
    tokens = [each.token for each in whole.logprobs.content]
    assert "".join(tokens).startswith("<tool_call>\n{") and whole.message.tool_calls
    parts = [chunk.choices[0].logprobs for chunk in chat(api, **how, stream=True)]
    assert [each.token for part in parts if part for each in part.content] == tokens


def test_an_answer_without_calls_is_text(api: openai.OpenAI) -> None:
    answer = chat(api, tools=TOOLS, max_tokens=12).choices[0]
    text = "".join(c.choices[0].delta.content or "" for c in chat(api, tools=TOOLS, max_tokens=12, stream=True))
    rendered = [{**tool, "function": {**tool["function"]}} for tool in TOOLS]
    assert answer.message.tool_calls is None and answer.message.content == text
    assert rendered and answer.message.content != chat(api, max_tokens=12).choices[0].message.content


def test_a_template_without_tools_is_refused(api: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine().target.tokenizer, "chat_template", "{{ messages[0].content }}")
    with pytest.raises(openai.BadRequestError, match="does not show tools to the model"):
        chat(api, tools=TOOLS)
