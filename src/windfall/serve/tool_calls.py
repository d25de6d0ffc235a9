"""The forms in which models write tool calls, and the constraint of a text that must call a tool."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from windfall.core.constraint import Constraint, Tags
from windfall.serve.tools import NO_ARGUMENTS, Tool

OPENING, CLOSING = "<tool_call>", "</tool_call>"  # Qwen, Hermes, SmolLM
MARKS = ("<|python_tag|>", "[TOOL_CALLS]")  # Llama and Mistral; special tokens, which most texts do not show
MISTRAL_ARGUMENTS = "[ARGS]"  # between name and arguments, in newer models of Mistral


@dataclass(frozen=True)
class Form:
    """How a model's chat template wants calls to be written."""

    tags: Tags
    arguments: str = "arguments"  # the key of the arguments
    is_list: bool = False  # whether all calls are one JSON list


HERMES = Form(Tags(f"{OPENING}\n", f"\n{CLOSING}", "\n"))
SMOLLM = Form(Tags(OPENING, CLOSING), is_list=True)
MISTRAL = Form(Tags(), is_list=True)
LLAMA = Form(Tags(separator="; "), "parameters")


def form_of(template: str) -> Form:
    """The form that a chat template shows."""
    if re.search(r"<tool_call>\s*\[", template):
        return SMOLLM
    if OPENING in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA if "parameters" in template and ("python_tag" in template or '"name":' in template) else HERMES


def call_constraint(form: Form, tools: list[Tool], parallel: bool) -> Constraint:
    """The constraint of a text that calls one of these tools, or with `parallel` several."""
    names = [f"call_{_letters(place)}" for place in range(len(tools))]
    definitions = {
        name: _moved(tool.function.parameters or NO_ARGUMENTS, f"#/$defs/{name}")
        for name, tool in zip(names, tools, strict=True)
    }
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, form.arguments: {"$ref": f"#/$defs/{name}"}},
            "required": ["name", form.arguments],
            "additionalProperties": False,
        }
        for name, tool in zip(names, tools, strict=True)
    ]
    schema: dict[str, Any] = {"$defs": definitions, "anyOf": calls}
    if form.is_list:
        most = {} if parallel else {"maxItems": 1}
        schema = {"$defs": definitions, "type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}
    return Constraint.tagged_json(form.tags, schema, many=parallel and not form.is_list)


def _letters(number: int) -> str:
    """A number in letters: names of definitions must differ in letters."""
    return "".join("abcdefghij"[int(digit)] for digit in str(number))


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to its own root lead to its new place."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
