"""Tool calls in the forms that models write, whole and in pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.grammars import END, TOKENS, guide
from windfall.core.constraint import BACKENDS
from windfall.serve.tool_calls import HERMES, LLAMA, MISTRAL, SMOLLM, Form, call_constraint, form_of
from windfall.serve.tool_stream import ToolStream, find_calls
from windfall.serve.tools import Tool

NAMES = {"find", "get_time"}
ONE = [("find", {"city": "Rome"})]
TWO = [*ONE, ("get_time", {})]
TEXTS: dict[str, tuple[str, list[tuple[str, Any]], str]] = {
    "qwen": ('<tool_call>\n{"name": "find", "arguments": {"city": "Rome"}}\n</tool_call>', ONE, ""),
    "qwen, two": (
        '<tool_call>\n{"name": "find", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        TWO,
        "",
    ),
    "qwen, text before": (
        'I look it up.\n<tool_call>\n{"name": "find", "arguments": {"city": "Rome"}}\n</tool_call>',
        ONE,
        "I look it up.",
    ),
    "qwen, not closed": ('<tool_call>\n{"name": "find", "arguments": {"city": "Rome"}}', ONE, ""),
    "smollm": (
        '<tool_call>[{"name": "find", "arguments": {"city": "Rome"}},\n'
        '{"name": "get_time", "arguments": {}}]</tool_call>',
        TWO,
        "",
    ),
    "llama": ('{"name": "find", "parameters": {"city": "Rome"}}', ONE, ""),
    "llama, two": ('{"name": "find", "parameters": {"city": "Rome"}}; {"name": "get_time", "parameters": {}}', TWO, ""),
    "llama, tag": ('<|python_tag|>{"name": "find", "parameters": {"city": "Rome"}}', ONE, ""),
    "mistral": ('[TOOL_CALLS] [{"name": "find", "arguments": {"city": "Rome"}}]', ONE, ""),
    "mistral, hidden mark": (' [{"name": "find", "arguments": {"city": "Rome"}}]', ONE, ""),
    "mistral, newer": ('[TOOL_CALLS]find[ARGS]{"city": "Rome"}[TOOL_CALLS]get_time[ARGS]{}', TWO, ""),
    "code block": ('```json\n{\n  "name": "find",\n  "arguments": {"city": "Rome"}\n}\n```', ONE, ""),
    "code block, two calls": (
        '```json\n{"name": "find", "arguments": {"city": "Rome"}}\n{"name": "get_time"}\n```',
        TWO,
        "",
    ),
    "code blocks": (
        '```\n{"name": "find", "arguments": {"city": "Rome"}}\n```\n```\n{"name": "get_time"}\n```\n',
        TWO,
        "",
    ),
    "code block, text after": ('```json\n{"name": "get_time"}\n```\nIt is late.', TWO[1:], "It is late."),
    "code block without a call": ('```json\n{"name": "Rome"}\n```', [], '```json\n{"name": "Rome"}\n```'),
    "code block with a name": ("```\nfind {}\n```", [], "```\nfind {}\n```"),
    "an example": ('So:\n```json\n{"name": "get_time"}\n```', [], 'So:\n```json\n{"name": "get_time"}\n```'),
    "arguments as text": ('{"name": "find", "arguments": "{\\"city\\": \\"Rome\\"}"}', ONE, ""),
    "text": ("The time is 12.", [], "The time is 12."),
    "json": ('{"city": "Rome"}', [], '{"city": "Rome"}'),
    "unknown tool": ('{"name": "drop", "arguments": {}}', [], '{"name": "drop", "arguments": {}}'),
    "cut off": ('<tool_call>\n{"name": "find", "argu', [], '<tool_call>\n{"name": "find", "argu'),
    "names in a text": ("find it yourself <b>now</b>", [], "find it yourself <b>now</b>"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_found(name: str) -> None:
    text, calls, content = TEXTS[name]
    found = find_calls(text, NAMES)
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found.calls] == calls
    assert found.content == content


def streamed(pieces: list[str], names: set[str] = NAMES) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls that a client puts together from the deltas of a stream."""
    stream, content, calls, ids = ToolStream(names), "", list[tuple[str, str]](), set[str]()
    for delta in [delta for piece in pieces for delta in stream.push(piece)] + stream.end():
        assert len(delta) == 1 and delta.keys() <= {"content", "tool_calls"}
        content += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            function = call["function"]
            if "id" in call:
                assert call.keys() == {"index", "id", "type", "function"} and call["type"] == "function"
                assert call["index"] == len(calls) and function["arguments"] == ""
                ids.add(call["id"])
                calls.append((function["name"], ""))
            else:
                assert call.keys() == {"index", "function"} and function.keys() == {"arguments"}
                assert call["index"] == len(calls) - 1 and function["arguments"]
                calls[-1] = (calls[-1][0], calls[-1][1] + function["arguments"])
    assert stream.called == bool(calls) and len(ids) == len(calls)
    return content, calls


def whole(text: str, names: set[str] = NAMES) -> tuple[str, list[tuple[str, str]]]:
    found = find_calls(text, names)
    return found.content, [(call.function.name, call.function.arguments) for call in found.calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", TEXTS)
def test_a_stream_finds_the_same(name: str, size: int) -> None:
    text = TEXTS[name][0]
    assert streamed([text[at : at + size] for at in range(0, len(text), size)]) == whole(text)


LETTERS = st.sampled_from('ab{}[]"\\</>_\n\t é😀:,;')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(LETTERS, max_size=8) | st.just("</tool_call><tool_call>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(LETTERS, max_size=4), inner, max_size=3),
    max_leaves=6,
)
DRAWN_CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(LETTERS, max_size=4), VALUES, max_size=3)),
    min_size=1,
    max_size=3,
)
STYLES: list[dict[str, Any]] = [{}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}]


def json_calls(key: str, calls: list[tuple[str, str]]) -> list[str]:
    return [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]


def write_named(calls: list[tuple[str, str]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


FAMILIES = {
    "hermes": lambda c: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in json_calls("arguments", c)),
    "smollm": lambda c: f"<tool_call>[{', '.join(json_calls('arguments', c))}]</tool_call>",
    "code block": lambda c: "```json\n" + "\n".join(json_calls("arguments", c)) + "\n```",
    "llama": lambda c: "; ".join(json_calls("parameters", c)),
    "mistral": lambda c: f"[TOOL_CALLS] [{', '.join(json_calls('arguments', c))}]",
    "mistral, newer": write_named,
}


@pytest.mark.parametrize("family", FAMILIES)
@given(calls=DRAWN_CALLS, style=st.sampled_from(STYLES), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_stream_has_the_arguments_as_they_were_written(
    family: str, calls: list[tuple[str, Any]], style: dict[str, Any], data: st.DataObject
) -> None:
    written = [(name, json.dumps(arguments, **style)) for name, arguments in calls]
    text = FAMILIES[family](written)
    assert whole(text) == ("", written)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert streamed([text[a:b] for a, b in pairwise([0, *cuts, len(text)])]) == ("", written)
    end = data.draw(st.integers(0, len(text)))  # the text may end anywhere
    assert streamed([text[a : min(b, end)] for a, b in pairwise([0, *cuts, len(text)])]) == whole(text[:end])


@given(parts=st.lists(st.sampled_from([*'{}[]",:; \n', "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "find",
    "<", "```", "```json\n", "abc", '{"name": "find"', '"name"', '"find"', '"arguments": {', '"parameters": "{}"',
    "<|python_tag|>"]), max_size=14), data=st.data())  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_any_text_is_the_same_in_pieces(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert streamed([text[a:b] for a, b in pairwise([0, *cuts, len(text)])]) == whole(text)
    content, calls = whole(text)
    assert calls or content == text


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_are_sent_while_they_are_written(family: str) -> None:
    text = FAMILIES[family]([("find", '{"city": "Rome"}'), ("get_time", '{"zone": "UTC"}')])
    stream, middle = ToolStream(NAMES), text.index("ome")
    first, *more = stream.push(text[:middle])
    assert first["tool_calls"][0]["function"] == {"name": "find", "arguments": ""}
    assert more == [{"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "R'}}]}]
    assert stream.push(text[middle : middle + 2]) == [{"tool_calls": [{"index": 0, "function": {"arguments": "om"}}]}]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"arguments": {"a" : 1}, "name": "find"}</tool_call>', "", [("find", '{"a" : 1}')]),
        ('{"id": [1, {"a": "}"}], "name": "find", "arguments": {}, "more": "}"}', "", [("find", "{}")]),
        ('<tool_call>{"name": "find"}</tool_call>', "", [("find", "{}")]),
        ('<tool_call>{"name": "find", "arguments": {"a": 1}\n</tool_call>', "", [("find", '{"a": 1}')]),
        ('<tool_call>{"name": "find", "arguments": {"a": 1}}}\n</tool_call>', "", [("find", '{"a": 1}')]),
        ('<tool_call>{"name": "find", "arguments": {"a": "b}}\n</tool_call>\n<tool_call>{"name": "get_time"}', "",
         [("find", '{"a": "b}}'), ("get_time", "{}")]),
        ('<tool_call>{"name": "find", "arguments": {"a": b}}</tool_call>', "", [("find", '{"a": b}')]),
        ('<tool_call>{"name": "find", "arguments": {"a": "b', "", [("find", '{"a": "b')]),
        ('<tool_call>{"name": "find", "arguments": {}}</tool_', "", [("find", "{}")]),
        ('```json\n{"name": "find", "arguments": {}}\n``', "", [("find", "{}")]),
        ('<tool_call>{"name": "find", "arguments": 5}</tool_call>',
         '<tool_call>{"name": "find", "arguments": 5}</tool_call>', []),
        ('Yes.\n<tool_call>{"name": "find"}</tool_call>\nDone.\n', "Yes.\nDone.", [("find", "{}")]),
        ('{"name": "find"} is a call.', "is a call.", [("find", "{}")]),
        ("find {it}", "find {it}", []),
        (" \n", " \n", []),
    ],
)  # fmt: skip
def test_unusual_texts(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert whole(text) == streamed([*text]) == (content, calls)


def test_text_is_not_held_back() -> None:
    stream = ToolStream(NAMES)
    assert stream.push("A b") == [{"content": "A b"}] and stream.push("c <") == [{"content": "c"}]
    assert stream.push("d") == [{"content": " <d"}] and stream.end() == []


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('…within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": …}\n</tool_call>', HERMES),
        ('…like this: <tool_call>[\n{"name": "func"}]</tool_call>', SMOLLM),
        ("{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ('…format {"name": function name, "parameters": dictionary}… <|python_tag|>', LLAMA),
        ("{{ tools }}", HERMES),
    ],
)
def test_the_form_of_a_template(template: str, form: Form) -> None:
    assert form_of(template) is form


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("form", [HERMES, SMOLLM, MISTRAL, LLAMA], ids=["hermes", "smollm", "mistral", "llama"])
@pytest.mark.parametrize("library", BACKENDS)
def test_what_a_constraint_demands_is_found(form: Form, parallel: bool, library: str) -> None:
    tools = [_tool("find", {"type": "object", "properties": {"id": {"$ref": "#/$defs/n"}}, "required": ["id"],
                            "$defs": {"n": {"type": "integer"}}}), _tool("end", None)]  # fmt: skip
    made = call_constraint(form, tools, parallel)
    one = {"name": "find", form.arguments: {"id": 5}}, {"name": "end", form.arguments: {}}
    first, both = ([json.dumps(each) for each in one[:count]] for count in (1, 2))
    for calls, allowed in ((first, True), (both, parallel)):
        tags = form.tags
        inner = [f"[{', '.join(calls)}]"] if form.is_list else calls
        text = tags.separator.join(f"{tags.begin}{each}{tags.end}" for each in inner)
        assert _accepts(made, text, library) is allowed
        assert [call.function.name for call in find_calls(text, {"find", "end"}).calls] == ["find", "end"][: len(calls)]
    wrong = json.dumps({"name": "end", form.arguments: {"id": 5}})
    assert not _accepts(made, f"{form.tags.begin}{f'[{wrong}]' if form.is_list else wrong}{form.tags.end}", library)


def _tool(name: str, parameters: Any) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


def _accepts(constraint: Any, text: str, library: str) -> bool:
    """Whether the text, in the longest tokens that are legal, follows the constraint."""
    state, taken = guide(constraint, library), list[int]()
    while text:
        state.go_to(taken)
        legal = [t for t, token in enumerate(TOKENS) if t > END and text.startswith(token) and state.legal(t)]
        if not legal:
            return False
        taken.append(max(legal, key=lambda token: len(TOKENS[token])))
        text = text[len(TOKENS[taken[-1]]) :]
    state.go_to(taken)
    return state.legal(END)
