"""GET /openapi.json: what the routes take, and all statuses that they answer with."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from windfall.serve.neutral import CHAT, COMPLETIONS, IGNORED, STREAM, Values
from windfall.serve.protocol import MAX_STOPS, MAX_TOKEN_ID, Answer, ChatRequest, CompletionRequest

Schema = dict[str, Any]

JSON_TYPE, EVENT_TYPE = "application/json", "text/event-stream"
REFERENCE = "#/components/schemas/{model}"
NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string", "minLength": 1}
IDS: Schema = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}}
FORMS: dict[str, Schema] = {  # of fields that are read before they are checked
    "prompt": {
        "anyOf": [
            TEXT,
            IDS,
            {"type": "array", "minItems": 1, "items": TEXT},
            {"type": "array", "minItems": 1, "items": IDS},
        ]
    },
    "stop": {"anyOf": [TEXT, {"type": "array", "maxItems": MAX_STOPS, "items": TEXT}]},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number"},
    },
}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ALWAYS = (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)
WITH_BODY = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.TOO_MANY_REQUESTS,
)


def describe(app: FastAPI, bodies: dict[str, type[BaseModel]], keys: bool) -> None:
    """Let the application describe itself.

    bodies: what the POST routes take, by path.
    keys: whether clients need a key.
    """

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app, bodies, keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(app: FastAPI, bodies: dict[str, type[BaseModel]], keys: bool) -> Schema:
    made: Schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    _add(schemas, "Error", ERROR)
    _add(schemas, "Answer", Answer.model_json_schema(ref_template=REFERENCE, mode="serialization"))
    for path, kind in bodies.items():
        _add(schemas, kind.__name__, accepted(kind))
        operation = made["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": {JSON_TYPE: {"schema": _reference(kind.__name__)}}}
        if "stream" in kind.model_fields:
            operation["responses"]["200"] = {
                "description": "the answer; with `stream` server-sent events",
                "content": {JSON_TYPE: {"schema": _reference("Answer")}, EVENT_TYPE: {}},
            }
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's own, which is answered with 400
            _add_errors(operation, path in bodies, "{" in path, keys)
    if keys:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made


def _add(schemas: Schema, name: str, schema: Schema) -> None:
    """Add a schema and the ones that it refers to."""
    own = dict(schema)
    schemas.update(own.pop("$defs", {}))
    schemas[name] = own


def _add_errors(operation: Schema, with_body: bool, with_name: bool, keys: bool) -> None:
    own = (*ALWAYS, *(WITH_BODY if with_body else ()), *((HTTPStatus.NOT_FOUND,) if with_name else ()))
    for status in (*own, *((HTTPStatus.UNAUTHORIZED,) if keys else ())):
        content = {JSON_TYPE: {"schema": _reference("Error")}}
        operation["responses"][str(int(status))] = {"description": status.phrase, "content": content}


def _reference(name: str) -> Schema:
    return {"$ref": REFERENCE.format(model=name)}


def accepted(kind: type[BaseModel]) -> Schema:
    """The JSON schema of the bodies that a route accepts: also nulls, other forms, and fields that are ignored."""
    schema = kind.model_json_schema(ref_template=REFERENCE)
    for each in (schema, *schema.get("$defs", {}).values()):
        _extend(each)
    if neutral := {ChatRequest: CHAT, CompletionRequest: COMPLETIONS}.get(kind):
        _add_neutral(schema, neutral)
        _add_neutral(schema["$defs"]["StreamOptions"], STREAM)
        schema["properties"].update({name: {} for name in IGNORED})
    return schema


def _add_neutral(schema: Schema, neutral: Values) -> None:
    """Add the values of these fields that ask for nothing."""
    known = schema["properties"]
    for name, values in neutral.items():
        forms = [{"const": value} for value in values]
        known[name] = {**known.get(name, {}), "anyOf": [*known.get(name, {}).get("anyOf", [NULL]), *forms]}


def _extend(schema: Schema) -> None:
    """Allow the other forms of fields, and null where a field may be left out."""
    if "properties" not in schema:
        return
    needed = schema.get("required", ())
    for name, field in schema["properties"].items():
        more = {key: field[key] for key in ("title", "description", "default") if key in field}
        field = {**more, **FORMS[name]} if name in FORMS else field
        schema["properties"][name] = field if name in needed else {**more, "anyOf": [field, NULL]}
