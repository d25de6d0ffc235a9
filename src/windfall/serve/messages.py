"""Chat messages and tools as the chat template of the model takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from windfall.core.errors import InputError
from windfall.engine.prompts import ModelInfo
from windfall.serve.protocol import ChatMessage
from windfall.serve.tools import Tool

DEVELOPER, SYSTEM = "developer", "system"  # roles


def template_of(model: ModelInfo) -> str:
    """The text of the chat template; empty if there is none."""
    template = getattr(model.tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else json.dumps(template)


def messages_for(model: ModelInfo, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages for the template. If it does not know the role `developer`, these messages are of the role `system`."""
    made = [message.as_dict() for message in messages]
    if DEVELOPER not in template_of(model):
        made = [{**each, "role": SYSTEM} if each["role"] == DEVELOPER else each for each in made]
    return made


def tools_for(model: ModelInfo, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools for the template. A template that does not show them to the model is refused."""
    if tools and "tools" not in template_of(model):
        raise InputError(f"the chat template of {model.name} does not show tools to the model; leave out `tools`")
    return [tool.as_dict() for tool in tools]


def check_chat(model: ModelInfo) -> None:
    """Refuse a model without a chat template."""
    if model.tokenizer is not None and not template_of(model):
        raise InputError(f"{model.name} has no chat template; send the text as `prompt` to /v1/completions")
