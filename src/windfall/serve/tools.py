"""Tools in requests and messages, in OpenAI's form."""

from __future__ import annotations

import json
import secrets
import string
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from windfall.serve.body import Body, wrong

MAX_TOOLS = 128
NAME = r"^[A-Za-z0-9_.-]{1,64}$"
ID_LETTERS = string.ascii_letters + string.digits
ID_LENGTH = 9  # what Mistral's chat templates want


class Function(Body):
    name: str = Field(pattern=NAME)
    description: str = ""
    parameters: dict[str, Any] | None = None  # a JSON schema; None: no arguments
    strict: bool = False


class Tool(Body):
    type: Literal["function"]
    function: Function

    def as_dict(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        own = self.function
        function = {"name": own.name, "description": own.description, "parameters": own.parameters or NO_ARGUMENTS}
        return {"type": "function", "function": function}


NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ToolFields(Body):
    """The fields of a chat request."""

    tools: list[Tool] = Field([], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_choice(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools]
        if len(names) != len({*names}):
            raise wrong("two tools have the same name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise wrong(f"tool_choice names the tool '{self.tool_choice.function.name}', which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise wrong("tool_choice 'required' needs tools")
        return self

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model sees and the answer may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> list[Tool]:
        """The answer must call one of these tools. Empty: it may be text."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return self.tools if self.tool_choice == "required" else []

    @property
    def may_call_several(self) -> bool:
        """Whether an answer that must call a tool may have several calls. By default a named tool is called once."""
        given = self.parallel_tool_calls
        return not isinstance(self.tool_choice, NamedTool) if given is None else given


# ---- calls in messages


class CalledFunction(Body):
    name: str
    arguments: str = "{}"

    @field_validator("arguments")
    @classmethod
    def _check(cls, given: str) -> str:
        try:
            whole = isinstance(json.loads(given), dict)
        except ValueError:
            whole = False
        if not whole:
            raise wrong("must be a JSON object, as text")
        return given


class MessageCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_dict(self) -> dict[str, Any]:
        arguments = json.loads(self.function.arguments)  # chat templates write it as JSON
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ToolMessageFields(Body):
    """The fields of a chat message that concern tools."""

    tool_calls: list[MessageCall] = Field([])
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_content(cls, given: Any) -> Any:
        """The content of a message with calls may be left out."""
        without = isinstance(given, dict) and given.get("content") is None and given.get("tool_calls")
        return {**given, "content": ""} if without else given

    def of_tools(self) -> dict[str, Any]:
        """These fields as chat templates take them."""
        calls = {"tool_calls": [call.as_dict() for call in self.tool_calls]} if self.tool_calls else {}
        return {**calls, **({} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id})}


# ---- calls in answers


class AnswerFunction(BaseModel):
    name: str
    arguments: str  # JSON


class AnswerCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction

    @classmethod
    def new(cls, name: str, arguments: str) -> AnswerCall:
        made = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
        return cls(id=made, function=AnswerFunction(name=name, arguments=arguments))
