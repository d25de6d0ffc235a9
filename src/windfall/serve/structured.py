"""Fields that ask for structured output: OpenAI's `response_format`, and those of vLLM and SGLang."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from windfall.core.constraint import Constraint
from windfall.serve.body import Body, wrong

Schema = dict[str, Any] | bool


class NamedSchema(Body):
    """The schema of a `response_format`. The answer follows it, whether `strict` is true or not."""

    name: str = ""
    description: str = ""
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool = False


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong('give the schema as {"type": "json_schema", "json_schema": {"name": "…", "schema": {…}}}')
        return self

    @property
    def constraint(self) -> Constraint | None:
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.schema_
        return Constraint.json_object() if schema is None else Constraint.json_schema(schema)


class StructuredOutputs(Body):
    """vLLM's field of this name."""

    json_: Schema | str | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = Field(None, min_length=1)


NOTHING = StructuredOutputs.model_validate({})


class StructuredFields(Body):
    """The fields of a request; at most one of them is given."""

    response_format: ResponseFormat | None = None
    regex: str | None = None
    ebnf: str | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _check_one(self) -> StructuredFields:
        if len(given := self._given()) > 1:
            raise wrong(f"{' and '.join(given)} both ask for structured output; give one of them")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """What the text must follow."""
        return next(iter(self._given().values()), None)

    def _given(self) -> dict[str, Constraint]:
        """The constraints that the fields ask for, by their names."""
        own, nested = self, self.structured_outputs or NOTHING
        found: dict[str, Constraint | None] = {
            "response_format": None if own.response_format is None else own.response_format.constraint,
            "regex": _made(Constraint.regex, own.regex),
            "ebnf": _made(Constraint.ebnf, own.ebnf),
            "structured_outputs.json": _made(Constraint.json_schema, nested.json_),
            "structured_outputs.json_object": Constraint.json_object() if nested.json_object else None,
            "structured_outputs.regex": _made(Constraint.regex, nested.regex),
            "structured_outputs.grammar": _made(Constraint.ebnf, nested.grammar),
            "structured_outputs.choice": _made(Constraint.choice, nested.choice),
            "guided_json": _made(Constraint.json_schema, own.guided_json),
            "guided_regex": _made(Constraint.regex, own.guided_regex),
            "guided_grammar": _made(Constraint.ebnf, own.guided_grammar),
            "guided_choice": _made(Constraint.choice, own.guided_choice),
        }
        return {name: constraint for name, constraint in found.items() if constraint is not None}


def _made(make: Any, given: Any) -> Constraint | None:
    return None if given is None else make(given)
