"""What a library would ignore in a schema or a pattern: the text could break the rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

IGNORED = (
    "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies", "not", "if",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems")
OF_OBJECTS = (
    "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "unevaluatedProperties",
)  # fmt: skip
ASSERTIONS = {*NUMERIC, *OF_STRINGS, *OF_ARRAYS, *OF_OBJECTS}
ALONE = (
    "$ref",
    "anyOf",
    "oneOf",
    "allOf",
    "enum",
    "const",
)  # xgrammar looks at one of these only
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
FORMATS = ("json-pointer", "relative-json-pointer", "ipv4")  # xgrammar allows bare quotes in them, or leading zeros
LOOKAROUND = re.compile(r"\(\?<?[=!]")


def ignored_by_xgrammar(schema: Any) -> str:
    """The first part of a schema that xgrammar would ignore; empty if there is none."""
    return _first_ignored(schema, lambda each: _ignored(each, schema))


def ignored_by_llguidance(schema: Any) -> str:
    """The first part of a schema that llguidance would ignore; empty if there is none."""
    return _first_ignored(schema, lambda each: _in_close_bounds(each) or _in_open_objects(each))


def _first_ignored(schema: Any, ignored: Callable[[dict[str, Any]], str]) -> str:
    try:
        return next(filter(None, map(ignored, subschemas(schema))), "")
    except RecursionError:
        return "its depth"
    except (AttributeError, KeyError, TypeError, ValueError):  # not a schema, which the library will say
        return ""


def ignored_in_regex(pattern: str) -> str:
    """The part of a pattern that xgrammar would ignore; empty if there is none."""
    if LOOKAROUND.search(pattern):
        return "lookahead and lookbehind"
    inner = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\.", "x", without_anchors(pattern))
    return "anchors inside a pattern" if "^" in inner or "$" in inner else ""


def without_anchors(pattern: str) -> str:
    """The pattern without `^` at its start and `$` at its end: the whole text must match anyway."""
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$"):
        backslashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
        if backslashes % 2 == 0:
            pattern = pattern[:-1]
    return pattern


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema, and all schemas inside it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for key in MAPS:
        inner = schema.get(key)
        for each in inner.values() if isinstance(inner, dict) else ():
            yield from subschemas(each)
    for key in LISTS:
        inner = schema.get(key)
        for each in inner if isinstance(inner, list) else ():
            yield from subschemas(each)
    for key in SINGLE:
        yield from subschemas(schema.get(key))


def _ignored(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """What is ignored in this schema, apart from the schemas inside it."""
    if found := next((key for key in IGNORED if key in schema), None):
        return f"'{found}'"
    if schema.get("uniqueItems"):
        return "'uniqueItems'"
    return _in_combination(schema, root) or _in_strings(schema) or _in_numbers(schema) or _in_objects(schema)


def _in_combination(schema: dict[str, Any], root: dict[str, Any]) -> str:
    given = [key for key in ALONE if key in schema]
    others = sorted(ASSERTIONS & schema.keys())
    if len(given) > 1 or (given and others):
        return f"'{(given[1:] or others)[0]}' beside '{given[0]}'"
    if given and "type" in schema and not (given[0] in ("enum", "const") and _values_fit(schema)):
        return f"'type' beside '{given[0]}'"
    if "$ref" in schema and not str(schema["$ref"]).startswith("#/") and schema["$ref"] != "#":
        return "a '$ref' that does not start with '#/'"
    if len(schema.get("allOf", ())) > 1:
        return "'allOf' of several schemas"
    if "oneOf" in schema and not _are_disjoint(schema["oneOf"], root):
        return "'oneOf' of schemas that may overlap"
    if not given and "type" not in schema:
        loose = {*ASSERTIONS} - {"properties", "items", "prefixItems"}
        if not {"properties", "items", "prefixItems"} & schema.keys() and (found := sorted(loose & schema.keys())):
            return f"'{found[0]}' without 'type'"
    return ""


def _in_strings(schema: dict[str, Any]) -> str:
    given = [key for key in ("pattern", "format") if key in schema]
    lengths = [key for key in ("minLength", "maxLength") if key in schema]
    if len(given) > 1 or (given and lengths):
        return f"'{[*given[1:], *lengths][0]}' beside '{given[0]}'"
    if schema.get("format") in FORMATS:
        return f"'format': '{schema['format']}'"
    pattern = str(schema.get("pattern", ""))
    if '"' in pattern or "\\\\" in pattern:
        return "quotes and backslashes in a 'pattern'"
    return ignored_in_regex(pattern)


def _in_numbers(schema: dict[str, Any]) -> str:
    if "multipleOf" not in schema:
        return ""
    bounded = any(key in schema for key in NUMERIC if key != "multipleOf")
    whole = schema.get("type") == "integer" and float(schema["multipleOf"]).is_integer()
    return "" if whole and not bounded else "'multipleOf' of numbers, of a fraction or beside bounds"


def _in_objects(schema: dict[str, Any]) -> str:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if any(name not in properties for name in required):
        return "'required' names that are not among the 'properties'"
    if properties and ("patternProperties" in schema or "propertyNames" in schema):
        return "'patternProperties' or 'propertyNames' beside 'properties'"
    if len(schema.get("patternProperties", ())) > 1:
        return "several 'patternProperties'"
    others = ("patternProperties", "additionalProperties", "unevaluatedProperties")
    if "propertyNames" in schema and (found := next((key for key in others if key in schema), None)):
        return f"'{found}' beside 'propertyNames'"
    return _in_open_objects(schema)


def _in_open_objects(schema: dict[str, Any]) -> str:
    """Neither library keeps a text from repeating a name that the schema does not list."""
    is_open = schema.get("additionalProperties", True) is not False or schema.get("patternProperties")
    counted = schema.get("minProperties", 0) - len(schema.get("required", ()))
    return "'minProperties' of names that may repeat" if is_open and counted > 1 else ""


def _in_close_bounds(schema: dict[str, Any]) -> str:
    """llguidance allows an exclusive bound that is whole, if the other bound is less than 1 away."""
    parts = [schema, *(each for each in schema.get("allOf", ()) if isinstance(each, dict))]
    low, high = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    found = {key: [part[key] for part in parts if key in part] for key in (*low, *high)}
    for excluded, others in ((low[1], high), (high[1], low)):
        near = [value for key in others for value in found[key]]
        if any(float(one).is_integer() and abs(one - other) < 1 for one in found[excluded] for other in near):
            return f"'{excluded}' so close to the other bound"
    return ""


def _values_fit(schema: dict[str, Any]) -> bool:
    """Whether all values of an `enum` or `const` have the type that stands beside it."""
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    kinds = {schema["type"]} if isinstance(schema["type"], str) else {*schema["type"]}
    return isinstance(values, list) and all(_kinds_of(value) & kinds for value in values)


def _kinds_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if float(value).is_integer() else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array" if isinstance(value, list) else "object" if isinstance(value, dict) else "null"}


def _are_disjoint(given: Any, root: dict[str, Any]) -> bool:
    """Whether no value can fit two of these schemas, as far as types, constants and required constants show it."""
    branches = [_resolved(each, root) for each in given] if isinstance(given, list) else []
    if not branches or not all(isinstance(each, dict) for each in branches):
        return False
    kinds = [_kinds(each) for each in branches]
    if all(kinds) and sum(map(len, kinds)) == len(set().union(*kinds)):
        return True
    shared = set.intersection(*({*each.get("required", [])} & each.get("properties", {}).keys() for each in branches))
    return any(_differ([each["properties"][name] for each in branches]) for name in shared)


def _resolved(schema: Any, root: Any) -> Any:
    """The schema that a `$ref` of this one leads to, or this one."""
    path = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(path, str) or not path.startswith("#/"):
        return schema
    for part in path[2:].split("/"):
        root = root.get(part) if isinstance(root, dict) else None
    return root


def _kinds(schema: dict[str, Any]) -> set[str]:
    kinds = {schema["type"]} if isinstance(schema.get("type"), str) else {*schema.get("type", [])}
    return {"number" if kind == "integer" else kind for kind in kinds}


def _differ(schemas: list[Any]) -> bool:
    """Whether these schemas allow different constants only."""
    values: list[str] = []
    for each in schemas:
        if not isinstance(each, dict) or not ("const" in each or "enum" in each):
            return False
        values += map(repr, each["enum"] if "enum" in each else [each["const"]])
    return len(values) == len({*values})
