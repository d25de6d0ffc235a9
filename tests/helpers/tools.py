"""An engine whose model can write JSON and is shown tools, and some tools."""

from __future__ import annotations

from functools import cache
from typing import Any

from helpers.grammars import json_tokenizer
from helpers.random_parallel import some_drafter
from helpers.serving import MODEL
from helpers.tiny import tiny
from windfall import registry
from windfall.engine.engine import Engine
from windfall.model.target import Target

TEMPLATE = (
    "{% if tools %}<|user|>{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "a", "parameters": parameters}}
    for name, parameters in {
        "find": {
            "type": "object",
            "properties": {"id": {"$ref": "#/$defs/id"}, "on": {"type": "boolean"}},
            "required": ["id", "on"],
            "$defs": {"id": {"type": "integer", "minimum": 0, "maximum": 99}},
        },
        "call": {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]},
        "end": None,
    }.items()
]


@cache
def engine() -> Engine:
    tokenizer = json_tokenizer()
    tokenizer.chat_template = TEMPLATE
    target = Target(tiny(num_hidden_layers=2, max_position_embeddings=1024), tokenizer, MODEL)
    return Engine(target, some_drafter("ngram"), registry.policy("chain", depth=2), max_requests=4)
