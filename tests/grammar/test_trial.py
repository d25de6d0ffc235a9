"""Compiling a constraint on trial, in another process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from helpers.grammars import END, SLOW_SCHEMA, json_tokenizer
from helpers.tiny import VOCABULARY as SIZE
from windfall.core.constraint import Constraint, Tags
from windfall.core.errors import InputError
from windfall.grammar.compile import Grammars
from windfall.grammar.trial import Trial, needs_trial


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    made = Trial(Grammars(json_tokenizer(), SIZE, (END,)).vocabulary)
    yield made
    made.close()


def test_usable_constraints_pass_and_others_get_the_same_error(trial: Trial) -> None:
    trial.check(Constraint.regex("a+"), 30)
    trial.check(Constraint.json_schema({"allOf": [{"minimum": 1}, {"maximum": 3}]}), 30)  # by the other library
    wrong = Constraint.regex("[0-9")
    with pytest.raises(InputError) as expected:
        Grammars(json_tokenizer(), SIZE, (END,)).compile(wrong)
    with pytest.raises(InputError) as found:
        trial.check(wrong, 30)
    assert str(found.value) == str(expected.value)


def test_a_constraint_that_takes_too_long_is_refused_and_the_next_one_is_not(trial: Trial) -> None:
    trial.check(Constraint.regex("a"), 30)
    start = time.monotonic()
    with pytest.raises(InputError, match=r"^the JSON schema cannot be used: to compile it takes more than 0.2 seconds"):
        trial.check(Constraint.json_schema(SLOW_SCHEMA), 0.2)
    assert time.monotonic() - start < 5
    trial.check(Constraint.regex("b"), 30)


def test_a_process_that_ends_by_itself_is_an_error_of_one_line(trial: Trial) -> None:
    trial.check(Constraint.regex("a"), 30)
    assert trial._process is not None
    killing = threading.Timer(0.2, trial._process.kill)
    killing.start()
    with pytest.raises(InputError, match=r"^the JSON schema cannot be used: to compile it needs more than 1 GiB"):
        trial.check(Constraint.json_schema(SLOW_SCHEMA), 30)
    killing.join()


def test_the_process_ends_with_its_owner() -> None:
    made = Trial(Grammars(json_tokenizer(), SIZE, (END,)).vocabulary)
    made.check(Constraint.regex("a"), 30)
    process = made._process
    assert process is not None and process.poll() is None
    del made
    assert process.wait(10) is not None


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
    assert needs_trial(constraint) != fast
