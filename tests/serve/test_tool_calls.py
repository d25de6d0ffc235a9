"""Tool calls in the forms that models write, whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.grammars import END, TOKENS, guide
from windfall.core.constraint import BACKENDS
from windfall.serve.tool_calls import HERMES, LLAMA, MISTRAL, SMOLLM, Form, call_constraint, find_calls, form_of
from windfall.serve.tool_stream import ToolStream
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


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", TEXTS)
def test_a_stream_finds_the_same(name: str, size: int) -> None:
    text, calls, content = TEXTS[name]
    stream = ToolStream(NAMES)
    deltas = [stream.push(text[at : at + size]) for at in range(0, len(text), size)] + [stream.end()]
    parts = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in parts] == list(range(len(calls)))
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in parts] == calls
    assert "".join(delta.get("content", "") for delta in deltas).strip() == content
    assert stream.called == bool(calls)


def test_text_is_not_held_back() -> None:
    stream = ToolStream(NAMES)
    assert stream.push("A b") == {"content": "A b"} and stream.push("c <") == {"content": "c "}
    assert stream.push("d") == {"content": "<d"} and stream.end() == {}


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
