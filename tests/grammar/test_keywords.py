"""Keywords of JSON Schema: what each library takes, and that it then allows no wrong text."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import pytest

from helpers.schema_cases import CASES, Case, Texts, taken
from windfall.core.constraint import BACKENDS

PAGE = Path(__file__).parents[2] / "docs" / "structured.md"
RANDOM_TEXTS = 6  # of each schema


def is_valid(schema: object, text: str) -> bool:
    """Whether a text is JSON that is valid for a schema, in which no name is repeated."""
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    try:
        return checker.is_valid(json.loads(text, object_pairs_hook=_object))
    except ValueError:
        return False


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name is repeated")
    return dict(pairs)


def texts_of(case: Case) -> list[Texts]:
    """The texts of a schema, by each library that takes it."""
    made = [taken(name, case.schema) for name in BACKENDS]
    for each in made:
        if isinstance(each, str):
            assert each.startswith("the JSON schema cannot be used: ") and "\n" not in each
    return [each for each in made if isinstance(each, Texts)]


@pytest.mark.parametrize("keyword", CASES)
def test_a_library_takes_a_schema_and_follows_it_or_refuses_it(keyword: str) -> None:
    for case in CASES[keyword]:
        made = texts_of(case)
        for text in case.valid:
            compact = text.replace(", ", ",").replace(": ", ":")
            assert is_valid(case.schema, text), (case, text)
            assert not made or any(texts.allows(text) or texts.allows(compact) for texts in made), (case, text)
        for text in case.wrong:
            assert not is_valid(case.schema, text), (case, text)
            assert not any(texts.allows(text) for texts in made), (case, text)


@pytest.mark.parametrize("keyword", CASES)
def test_random_texts_are_valid(keyword: str) -> None:
    ended = 0
    for case in CASES[keyword]:
        for texts in texts_of(case):
            for seed in range(RANDOM_TEXTS):
                if (text := texts.random(random.Random(seed))) is not None:
                    ended += 1
                    assert jsonschema.Draft202012Validator(case.schema).is_valid(json.loads(text)), (case, text)
    assert ended or not any(map(texts_of, CASES[keyword]))


def test_the_page_says_what_each_library_takes() -> None:
    lines = PAGE.read_text().partition("## Keywords of JSON Schema")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    said = {keyword.strip(" `"): cells for keywords, *cells in rows for keyword in keywords.split(",")}
    found = {}
    for keyword, cases in CASES.items():
        counts = [sum(isinstance(taken(name, case.schema), Texts) for case in cases) for name in BACKENDS]
        found[keyword] = ["no" if not count else "yes" if count == len(cases) else "some" for count in counts]
    assert {keyword: [cell if cell in ("yes", "no") else "some" for cell in said[keyword]] for keyword in said} == found
