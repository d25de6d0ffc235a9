"""Which constraints of clients need a trial before they are compiled."""

from __future__ import annotations

import pytest

from windfall.core.constraint import Constraint, Tags
from windfall.grammar.limits import compiles_fast


@pytest.mark.parametrize(
    ("constraint", "fast"),
    [
        (Constraint.json_object(), True),
        (Constraint.json_schema({"type": "object", "properties": {"pattern": {"$ref": "#/$defs/a"}}}), True),
        (Constraint.json_schema({"properties": {"a": {"anyOf": [{"type": "null"}, {"pattern": "a+"}]}}}), False),
        (Constraint.json_schema({"type": "array", "maxItems": 10**6}), False),
        (Constraint.json_schema({"enum": ["x" * 5000]}), False),
        (Constraint.tagged_json(Tags("<a>", "</a>"), {"type": "object"}, True), True),
        (Constraint.tagged_json(Tags("<a>", "</a>"), {"type": "string", "minLength": 3}, True), False),
        (Constraint.regex("a+"), False),
    ],
)
def test_only_short_schemas_without_costly_parts_need_none(constraint: Constraint, fast: bool) -> None:
    assert compiles_fast(constraint) == fast
