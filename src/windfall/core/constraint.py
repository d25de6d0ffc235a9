"""What a text must follow: a JSON schema, a regular expression, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windfall.core.errors import InputError

BACKENDS = ("xgrammar", "llguidance")  # the first that is installed and supports a constraint is used
MAX_SOURCE_CHARACTERS = 100_000
MAX_DEPTH = 128  # of objects and lists in a schema; deeper ones take long to compile
KEYWORDS = ("json_schema", "json_object", "regex", "ebnf")  # of Engine.generate, each a constraint
BACKEND_KEYWORD = "grammar_backend"
ANY_OBJECT = '{"type": "object", "additionalProperties": true}'


@dataclass(frozen=True)
class Constraint:
    """A rule that every prefix of a text must be able to fulfil. Equal constraints are compiled once."""

    kind: str  # "json_schema", "regex", "ebnf" or "tagged_json"
    source: str  # JSON text, a pattern, or a grammar
    backend: str | None = None  # the library that compiles it; None: the first that can

    def __post_init__(self) -> None:
        if len(self.source) > MAX_SOURCE_CHARACTERS:
            raise InputError(f"a {self.name} has {MAX_SOURCE_CHARACTERS} characters at most, not {len(self.source)}")
        if self.backend is not None and self.backend not in BACKENDS:
            raise InputError(f"grammar_backend is {' or '.join(BACKENDS)}, not {self.backend!r}")

    @property
    def name(self) -> str:
        """How messages call it."""
        return {"regex": "regular expression", "ebnf": "grammar"}.get(self.kind, "JSON schema")

    @classmethod
    def json_schema(cls, schema: Any, backend: str | None = None) -> Constraint:
        """JSON that is valid for a schema: a dict, JSON text, or a pydantic model."""
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise InputError(f"json_schema is not valid JSON: {error}") from None
        if not isinstance(schema, Mapping | bool):
            raise InputError(f"json_schema takes a JSON Schema (an object), not {_brief(schema)}")
        return cls("json_schema", _as_json(schema), backend)

    @classmethod
    def json_object(cls, backend: str | None = None) -> Constraint:
        """Any JSON object."""
        return cls("json_schema", ANY_OBJECT, backend)

    @classmethod
    def regex(cls, pattern: Any, backend: str | None = None) -> Constraint:
        """A text that matches a regular expression as a whole."""
        return cls("regex", _text("regex", pattern), backend)

    @classmethod
    def ebnf(cls, grammar: Any, backend: str | None = None) -> Constraint:
        """A text of a grammar in the EBNF of llama.cpp (GBNF), whose first rule is `root`."""
        return cls("ebnf", _text("ebnf", grammar), backend)

    @classmethod
    def tagged_json(cls, tags: Tags, schema: Any, many: bool) -> Constraint:
        """JSON between fixed texts, once or, with `many`, several times."""
        parts = {"begin": tags.begin, "end": tags.end, "separator": tags.separator, "schema": schema, "many": many}
        return cls("tagged_json", _as_json(parts))

    @classmethod
    def choice(cls, options: list[str], backend: str | None = None) -> Constraint:
        """One of several texts."""
        quoted = [json.dumps(option, ensure_ascii=False) for option in options]
        return cls("ebnf", f"root ::= {' | '.join(quoted)}", backend)


@dataclass(frozen=True)
class Tags:
    """The fixed texts around each piece of JSON."""

    begin: str = ""
    end: str = ""
    separator: str = ""  # between two pieces


def with_constraint(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a generation with a `constraint` in the place of `json_schema`, `regex` and so on."""
    rest = {key: value for key, value in sampling.items() if key not in (*KEYWORDS, BACKEND_KEYWORD)}
    given = {key: value for key in KEYWORDS if (value := sampling.get(key)) is not None and value is not False}
    if "json_schema" in sampling and sampling["json_schema"] is False:
        given["json_schema"] = False
    if rest.get("constraint") is not None:
        given["constraint"] = rest["constraint"]
    if len(given) > 1:
        raise InputError(f"give one of {', '.join(given)}: a text follows one constraint")
    backend = sampling.get(BACKEND_KEYWORD)
    for key, value in given.items():
        if key == "json_object":
            if value is not True:
                raise InputError(f"json_object must be True or False, not {_brief(value)}")
            rest["constraint"] = Constraint.json_object(backend)
        elif key != "constraint":
            rest["constraint"] = getattr(Constraint, key)(value, backend)
    return rest


def _as_json(schema: Any) -> str:
    if _is_deeper(schema, MAX_DEPTH):
        raise InputError(f"a JSON schema has {MAX_DEPTH} levels at most")
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"json_schema cannot be written as JSON: {error}") from None


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(each, levels - 1) for each in inner)


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise InputError(f"{name} takes a text that is not empty, not {_brief(given)}")
    return given


def _brief(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 60 else f"a {type(value).__name__}"
