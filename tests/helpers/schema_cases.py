"""Small JSON schemas by keyword, each with texts that are valid for it and texts that are not."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from windfall.core.constraint import Constraint
from windfall.core.errors import InputError
from windfall.grammar.base import Grammar
from windfall.grammar.compile import Compiler
from windfall.grammar.guide import Guide
from windfall.grammar.vocabulary import Vocabulary

END, LONGEST = 0, 60  # the token that ends a text; the bytes after which a random text tries to end
CLOSING = [1 + byte for byte in b'"}]']


class Case(NamedTuple):
    """A schema that uses a keyword."""

    schema: dict[str, Any] | bool
    valid: tuple[str, ...] = ()  # texts that the grammar must allow, if the library takes the schema
    wrong: tuple[str, ...] = ()  # texts that it must forbid


A = {"type": "object", "properties": {"a": {"type": "integer"}}}
PAIR = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}]}
DATES = {"type": "string", "format": "date"}
KINDS = [{**A, "properties": {"is": {"const": name}, name: {"type": "null"}}, "required": ["is"]} for name in "ab"]
TREE = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}}}

CASES: dict[str, list[Case]] = {
    "type": [
        Case({"type": "integer"}, ("0", "-12"), ("1.5", '"1"', "01", "true")),
        Case({"type": "number"}, ("0.5", "-3"), (".5", "null", '"a"')),
        Case({"type": "string"}, ('""', '"a b"', '"é"', '"\\n"'), ("a", "1", '"a', '"\n"')),
        Case({"type": "boolean"}, ("true", "false"), ("0", '"true"', "null")),
        Case({"type": "null"}, ("null",), ("0", '""', "false")),
        Case({"type": "array"}, ("[]", "[1, null]"), ("{}", '"[]"', "[1,]")),
        Case({"type": "object"}, ("{}", '{"a": [1]}'), ("[]", "null", "{1: 2}")),
        Case({"type": ["integer", "null"]}, ("3", "null"), ("3.5", '""', "[]")),
    ],
    "enum": [
        Case({"enum": ["a", 2, None]}, ('"a"', "2", "null"), ('"b"', "3", "true")),
        Case({"enum": [{"a": 1}, [True, []]]}, ('{"a": 1}', "[true, []]"), ('{"a": 2}', "[true]", "{}")),
        Case({"type": "string", "enum": ["a", 'q"\\']}, ('"a"', '"q\\"\\\\"'), ('"q"', "1")),
        Case({"enum": [False]}, ("false",), ("0", "true")),
    ],
    "const": [
        Case({"const": "ab"}, ('"ab"',), ('"a"', '"abc"', "1")),
        Case({"const": {"a": [None, 1.5]}}, ('{"a": [null, 1.5]}',), ('{"a": [null]}', "{}")),
        Case({**A, "properties": {"a": {"const": 7}}}, ('{"a": 7}', "{}"), ('{"a": 8}',)),
    ],
    "properties": [
        Case({**A, "additionalProperties": False}, ("{}", '{"a": 1}'), ('{"a": "1"}', '{"b": 1}')),
        Case({"properties": {"a": {"type": "integer"}}}, ('{"a": 1}', "{}"), ('{"a": "1"}', '{"a": null}')),
        Case({"type": "object", "properties": {"a": A}}, ('{"a": {"a": 2}}',), ('{"a": {"a": true}}', '{"a": 1}')),
    ],
    "required": [
        Case({**A, "required": ["a"]}, ('{"a": 1}',), ("{}", '{"b": 1}')),
        Case({"type": "object", "required": ["a", "b"]}, ('{"a": 1, "b": 2}',), ('{"a": 1}', "{}")),
        Case({**A, "required": []}, ("{}",), ("[]",)),
        Case(
            {"type": "object", "required": ["a"], "patternProperties": {"^a$": {"type": "null"}}},
            ('{"a": null}',),
            ("{}", '{"a": 1}'),
        ),
    ],
    "additionalProperties": [
        Case({**A, "additionalProperties": {"type": "null"}}, ('{"a": 1, "b": null}',), ('{"b": 1}', '{"a": null}')),
        Case({**A, "additionalProperties": True}, ('{"a": 1, "b": "c"}',), ('{"a": "c"}',)),
        Case({"type": "object", "additionalProperties": False}, ("{}",), ('{"a": 1}',)),
        Case({"additionalProperties": {"type": "null"}}, ('{"a": null}',), ('{"a": 1}',)),
    ],
    "items": [
        Case({"type": "array", "items": {"type": "integer"}}, ("[]", "[1, 2]"), ('["a"]', "[1, null]")),
        Case({"type": "array", "items": False}, ("[]",), ("[1]",)),
        Case({**PAIR, "items": {"type": "null"}}, ("[1, true, null]",), ("[1, true, 2]",)),
        Case({"items": {"type": "integer"}}, ("[1]",), ('["a"]',)),
    ],
    "prefixItems": [
        Case(PAIR, ("[1, true]",), ('["a"]', "[1, 2]")),
        Case({**PAIR, "items": False, "minItems": 2}, ("[1, true]",), ("[1, true, 1]", "[1]", "[]")),
        Case({"prefixItems": [{"type": "null"}]}, ("[null]",), ("[1]",)),
    ],
    "minItems": [
        Case({"type": "array", "items": {"type": "null"}, "minItems": 2}, ("[null, null]",), ("[]", "[null]")),
        Case({"type": "array", "minItems": 1}, ("[1]",), ("[]",)),
        Case({"minItems": 1}, ("[1]",), ("[]",)),
    ],
    "maxItems": [
        Case({"type": "array", "items": {"type": "null"}, "maxItems": 1}, ("[]", "[null]"), ("[null, null]",)),
        Case({"type": "array", "maxItems": 0}, ("[]",), ("[1]",)),
        Case({"maxItems": 1}, ("[1]",), ("[1, 2]",)),
    ],
    "minLength": [
        Case({"type": "string", "minLength": 2}, ('"ab"', '"éé"', '"abc"'), ('""', '"a"', '"é"')),
        Case({"minLength": 1}, ('"a"',), ('""',)),
    ],
    "maxLength": [
        Case({"type": "string", "maxLength": 2}, ('""', '"ab"', '"éé"', '"\U0001f600a"'), ('"abc"',)),
        Case({"type": "string", "minLength": 1, "maxLength": 1}, ('"a"',), ('""', '"ab"')),
        Case({"type": "string", "pattern": "^a", "maxLength": 2}, ('"a"', '"ab"'), ('"abc"', '"b"')),
    ],
    "pattern": [
        Case({"type": "string", "pattern": "^[a-c]{2}$"}, ('"ab"',), ('"a"', '"ad"', '"abc"')),
        Case({"type": "string", "pattern": "^(a|bc)+$"}, ('"abca"',), ('"b"', '""')),
        Case({"type": "string", "pattern": "^a{1,2}b?$"}, ('"aab"',), ('"b"', '"aaab"')),
        Case({"pattern": "^a$"}, ('"a"',), ('"b"',)),
    ],
    "minimum": [
        Case({"type": "integer", "minimum": 3}, ("3", "40"), ("2", "-5", "3.5")),
        Case({"type": "number", "minimum": -0.5}, ("-0.5", "0", "12.5"), ("-0.6", "-1")),
        Case({"minimum": 3}, ("3",), ("2",)),
    ],
    "maximum": [
        Case({"type": "integer", "minimum": 0, "maximum": 120}, ("0", "99", "120"), ("121", "-1")),
        Case({"type": "number", "maximum": 1}, ("1", "0.25", "-7"), ("1.5", "2")),
        Case({"maximum": 1}, ("1",), ("2",)),
    ],
    "exclusiveMinimum": [
        Case({"type": "integer", "exclusiveMinimum": 3}, ("4",), ("3", "-4")),
        Case({"type": "number", "exclusiveMinimum": 0}, ("0.5", "1"), ("0", "-1")),
        Case({"exclusiveMinimum": 0, "maximum": 0.5}, ("0.25", "0.5"), ("0", "0.75")),
    ],
    "exclusiveMaximum": [
        Case({"type": "integer", "exclusiveMaximum": 3}, ("2",), ("3", "4")),
        Case({"type": "number", "minimum": 0, "exclusiveMaximum": 10}, ("9.75",), ("10", "-1")),
        Case({"minimum": -0.5, "exclusiveMaximum": 0}, ("-0.25", "-0.5"), ("-0", "0", "-1")),
    ],
    "multipleOf": [
        Case({"type": "integer", "multipleOf": 3}, ("0", "9", "-12"), ("1", "10")),
        Case({"type": "integer", "multipleOf": 1.5}, ("3", "6"), ("2", "4")),
        Case({"type": "integer", "multipleOf": 5, "minimum": 6}, ("10",), ("5", "7")),
        Case({"type": "number", "multipleOf": 0.5}, ("1.5", "2"), ("0.25",)),
    ],
    "anyOf": [
        Case({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ("1", "null"), ('""', "1.5")),
        Case({"anyOf": [A, {"type": "string", "maxLength": 1}]}, ('{"a": 1}', '"b"'), ('"bb"', '{"a": "b"}')),
    ],
    "oneOf": [
        Case({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ('"a"', "1"), ("null", "1.5")),
        Case({"oneOf": KINDS}, ('{"is": "a", "a": null}',), ('{"is": "a", "a": 1}', '{"is": "c"}')),
        Case({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ("1.5",), ("1",)),
    ],
    "allOf": [
        Case({"allOf": [{"type": "integer", "minimum": 3}]}, ("3",), ("2", '"a"')),
        Case({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ("3", "5"), ("2", "6")),
    ],
    "$ref": [
        Case({"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}, ("null",), ("1", "{}")),
        Case(TREE, ("[]", "[[], [[]]]"), ("[1]", "[[], [], []]")),
        Case({**A, "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}, ('{"a": {"a": {}}}',), ("[]",)),
    ],
    "patternProperties": [
        Case({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, ('{"ab": null}', "{}"), ('{"ab": 1}',)),
        Case(
            {**A, "patternProperties": {"^b": {"type": "null"}}, "additionalProperties": False},
            ('{"a": 1}', '{"b": null}'),
            ('{"a": null}', '{"b": 1}', '{"c": 1}'),
        ),
        Case(
            {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"maximum": 3}}},
            (),
            ('{"ab": 4}', '{"a": null}'),
        ),
    ],
    "propertyNames": [
        Case({"type": "object", "propertyNames": {"enum": ["a"]}}, ('{"a": 1}', "{}"), ('{"b": 1}',)),
        Case(
            {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": False},
            ("{}",),
            ('{"a": 1}', '{"b": 1}'),
        ),
    ],
    "minProperties": [
        Case({"type": "object", "minProperties": 1}, ('{"a": 1}',), ("{}",)),
        Case(
            {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": 2},
            ('{"a": 1, "b": 2}',),
            ('{"a": 1}', "{}"),
        ),
        Case({"type": "object", "minProperties": 2}, ('{"a": 1, "b": 2}',), ('{"a": 1}', '{"a": 1, "a": 2}')),
    ],
    "maxProperties": [
        Case({"type": "object", "maxProperties": 1}, ("{}", '{"a": 1}'), ('{"a": 1, "b": 2}',)),
        Case({"maxProperties": 1}, ("{}", '{"a": 1}'), ('{"a": 1, "b": 2}',)),
    ],
    "format": [
        Case(DATES, ('"2026-11-30"',), ('"30.11.2026"', '"2026-13-01"', '""')),
        Case({"type": "string", "format": "ipv4"}, ('"10.0.0.255"',), ('"10.0.0.256"', '"010.0.0.1"', '"10.0.0"')),
        Case({"type": "string", "format": "json-pointer"}, ('"/a/b"',), ('"/a"b"',)),
        Case({**DATES, "minLength": 3}, ('"2026-11-30"',), ('"ab"',)),
    ],
    "unevaluatedItems": [
        Case({**PAIR, "unevaluatedItems": False}, ("[1, true]",), ("[1, true, 1]",)),
        Case({"unevaluatedItems": False}, ("[]",), ("[1]",)),
    ],
    "unevaluatedProperties": [
        Case({**A, "unevaluatedProperties": False}, ('{"a": 1}',), ('{"b": 1}',)),
        Case({"allOf": [A], "unevaluatedProperties": False}, ('{"a": 1}',), ('{"b": 1}',)),
    ],
    "uniqueItems": [Case({"type": "array", "uniqueItems": True}, ("[1, 2]",), ("[1, 1]",))],
    "contains": [Case({"type": "array", "contains": {"type": "null"}}, ("[null]",), ("[]",))],
    "minContains": [Case({"type": "array", "contains": {"const": 1}, "minContains": 2}, ("[1, 1]",), ("[1]",))],
    "maxContains": [Case({"type": "array", "contains": {"const": 1}, "maxContains": 1}, ("[1]",), ("[1, 1]",))],
    "not": [Case({"not": {"type": "string"}}, ("1",), ('"a"',)), Case({**A, "not": {}}, (), ("{}",))],
    "if": [Case({"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "null"}}, ("3",), ("2", '"a"'))],
    "dependentRequired": [
        Case({"type": "object", "dependentRequired": {"a": ["b"]}}, ('{"b": 1}',), ('{"a": 1}',)),
    ],
    "dependentSchemas": [
        Case({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, ('{"b": 1}',), ('{"a": 1}',)),
    ],
    "$dynamicRef": [Case({"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x", "type": "null"}}}, ("null",))],
}


class Texts:
    """The texts that a library allows for a schema."""

    def __init__(self, grammar: Grammar):
        self._grammar = grammar

    def allows(self, text: str) -> bool:
        """Whether this text can be written, up to its end."""
        guide, tokens = Guide(self._grammar, (END,)), [1 + byte for byte in text.encode()]
        for place, token in enumerate(tokens):
            if not guide.legal(token):
                return False
            guide.go_to(tokens[: place + 1])
        return guide.legal(END)

    def random(self, choose: random.Random) -> str | None:
        """Any text; None if it does not end soon."""
        guide, tokens = Guide(self._grammar, (END,)), list[int]()
        while len(tokens) < 4 * LONGEST:
            legal = np.flatnonzero(guide.mask()).tolist()
            if legal[0] == END and (len(legal) == 1 or len(tokens) > LONGEST or choose.random() < 0.3):
                return bytes(token - 1 for token in tokens).decode()
            others = [token for token in legal if token != END]
            usual = [token for token in others if 32 <= token - 1 < 127] or others
            closing = [token for token in usual if token in CLOSING]
            tokens.append(choose.choice(closing if closing and len(tokens) > LONGEST else usual))
            guide.go_to(tokens)
        return None


def taken(name: str, schema: dict[str, Any] | bool) -> Texts | str:
    """The texts of a schema, or the message with which this library refuses it."""
    try:
        return Texts(byte_compiler().compile(Constraint.json_schema(schema, name)))
    except InputError as error:
        return str(error)


@cache
def byte_compiler() -> Compiler:
    """For a vocabulary of the end of a text and all bytes."""
    return Compiler(Vocabulary([b"", *(bytes([value]) for value in range(256))]))
