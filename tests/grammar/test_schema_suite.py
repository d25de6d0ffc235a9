"""The schemas of JSON-Schema-Test-Suite, which `make schemas` downloads.

Each schema is refused, or no text is allowed that its tests call invalid and all random texts are valid.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from helpers.schema_cases import Texts, taken
from windfall.core.constraint import BACKENDS

VARIABLE = "JSON_SCHEMA_TEST_SUITE"  # the folder of the suite, also for the tests of jsonschema
DRAFT = "draft2020-12"
ROUNDED = {"by small number"}  # jsonschema divides 188.2318 by 0.0001 in floating point
FILES = sorted((Path(os.environ.get(VARIABLE, "")) / "tests" / DRAFT).glob("*.json"))

pytestmark = pytest.mark.skipif(not FILES, reason=f"{VARIABLE} does not name the suite's folder; run: make schemas")


def groups(file: Path) -> Iterator[tuple[str, dict[str, Any] | bool, list[dict[str, Any]]]]:
    for group in json.loads(file.read_text()):
        yield group["description"], group["schema"], group["tests"]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_schemas_are_followed_or_refused(file: Path, name: str) -> None:
    for description, schema, tests in groups(file):
        texts = taken(name, schema)
        if isinstance(texts, str):
            assert texts.startswith("the JSON schema cannot be used: ") and "\n" not in texts
            continue
        for test in tests:
            text = json.dumps(test["data"], ensure_ascii=False)
            assert test["valid"] or not texts.allows(text), (description, test)
        for seed in range(0 if description in ROUNDED else 5):
            if (text := texts.random(random.Random(seed))) is not None:
                assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), (description, text)


def test_much_of_the_suite_is_taken() -> None:
    schemas = refused = allowed = valid = 0
    for file in FILES:
        for _, schema, tests in groups(file):
            made = [each for name in BACKENDS if isinstance(each := taken(name, schema), Texts)]
            schemas, refused = schemas + 1, refused + (not made)
            for text in (json.dumps(test["data"], ensure_ascii=False) for test in tests if made and test["valid"]):
                valid, allowed = valid + 1, allowed + any(texts.allows(text) for texts in made)
    print(f"{schemas - refused} of {schemas} schemas are taken; {allowed} of {valid} valid texts are allowed")
    assert schemas - refused >= 165 and allowed >= 0.9 * valid
