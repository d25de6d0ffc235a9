"""Matchers of both libraries: masks, undoing, the end of a text, and errors."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch

from helpers.grammars import CONSTRAINTS, END, SCHEMA, TOKENS, backend, guide, ids, json_tokenizer
from helpers.tiny import VOCABULARY
from windfall.core.constraint import BACKENDS, MAX_SOURCE_CHARACTERS, Constraint, with_constraint
from windfall.core.errors import InputError
from windfall.core.tree import DraftTree
from windfall.grammar import compile as compiling
from windfall.grammar import guide as following
from windfall.grammar.compile import Grammars
from windfall.grammar.limits import ignored_by_xgrammar, ignored_in_regex, without_anchors

both = pytest.mark.parametrize("name", BACKENDS)
YES_OR_NO = Constraint.ebnf('root ::= "si" | "no" "pe"?')


def deep(levels: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def constraint(kind: str) -> Constraint:
    return with_constraint(CONSTRAINTS[kind])["constraint"]


@both
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_legal_tokens_are_those_of_the_mask_and_undoing_restores_it(name: str, kind: str) -> None:
    matcher, choose = backend(name).compile(constraint(kind)).matcher(), random.Random(3)
    masks, with_text = [matcher.mask()], range(4, len(TOKENS))
    while masks[-1].any() and len(masks) < 25:
        mask = masks[-1]
        assert [matcher.legal(token) for token in with_text] == mask[with_text].tolist()
        assert not mask[:4].any() and not mask[len(TOKENS) :].any(), "special tokens and logits without a token"
        matcher.advance(choose.choice(np.flatnonzero(mask).tolist()))
        masks.append(matcher.mask())
    for mask in reversed(masks[:-1]):
        matcher.undo(1)
        assert (matcher.mask() == mask).all()


@both
def test_the_end_is_legal_exactly_when_the_grammar_may_end(name: str) -> None:
    text = guide(YES_OR_NO, name)
    allowed = {}
    for spelled in ("", "n", "no", "nop", "nope", "s", "si"):
        text.go_to(ids(spelled))
        allowed[spelled] = (text.legal(END), bool(text.mask()[END]), text.over)
    assert allowed == {
        "": (False, False, False),
        "n": (False, False, False),
        "no": (True, True, False),
        "nop": (False, False, False),
        "nope": (True, True, True),
        "s": (False, False, False),
        "si": (True, True, True),
    }


@both
def test_a_finished_text_still_has_a_mask(name: str) -> None:
    """Other engines fail when they ask a terminated matcher."""
    text = guide(Constraint.regex("ab"), name)
    text.follow(ids("ab"))
    assert text.over and np.flatnonzero(text.mask()).tolist() == [END]
    without_end = guide(Constraint.regex("ab"), name, eos=())
    without_end.follow(ids("ab"))
    assert without_end.over and not without_end.mask().any() and not without_end.legal(END)


@both
def test_a_finished_matcher_may_be_asked_again_and_undone(name: str) -> None:
    matcher = backend(name).compile(Constraint.regex("ab|abc")).matcher()
    for token in ids("abc"):
        matcher.advance(token)
    for _ in range(3):
        assert matcher.may_end and not matcher.mask().any() and not any(map(matcher.legal, ids("abc")))
    matcher.undo(1)
    assert matcher.may_end and [TOKENS[token] for token in np.flatnonzero(matcher.mask())] == ["c"]
    matcher.undo(2)
    assert not matcher.may_end and matcher.mask()[TOKENS.index("ab")]


@both
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Constraint.regex("[0-9"), "the regular expression cannot be used: "),
        (Constraint.regex("(?=a)b"), "the regular expression cannot be used: "),
        (Constraint.ebnf("root ::= foo"), "the grammar cannot be used: "),
        (Constraint.ebnf("nonsense"), "the grammar cannot be used: "),
        (Constraint.json_schema({"type": "blah"}), "the JSON schema cannot be used: "),
        (Constraint.json_schema({"$ref": "#/nope"}), "the JSON schema cannot be used: "),
        (Constraint.json_schema({"type": "array", "uniqueItems": True}), "the JSON schema cannot be used: "),
        (Constraint.json_schema(False), "the JSON schema cannot be used: "),
    ],
)
def test_a_wrong_constraint_is_an_error_of_one_line(name: str, wrong: Constraint, message: str) -> None:
    grammars = Grammars(json_tokenizer(), VOCABULARY, (END,))
    for given in (wrong, Constraint(wrong.kind, wrong.source, name)):
        with pytest.raises(InputError, match=rf"^{message}[^\n]+$") as caught:
            grammars.compile(given)
        assert "/project/" not in str(caught.value)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"json_schema": "{"}, "json_schema is not valid JSON: "),
        ({"json_schema": 3}, "json_schema takes a JSON Schema"),
        ({"json_schema": {"a": {1}}}, "json_schema cannot be written as JSON"),
        ({"json_schema": deep(70)}, "a JSON schema has 128 levels at most"),
        ({"json_object": 1}, "json_object must be True or False, not 1"),
        ({"regex": ""}, "regex takes a text that is not empty, not ''"),
        ({"ebnf": 5}, "ebnf takes a text that is not empty, not 5"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "give one of regex, ebnf"),
        ({"regex": "a", "grammar_backend": "other"}, "grammar_backend is xgrammar or llguidance, not 'other'"),
        ({"regex": "a" * (MAX_SOURCE_CHARACTERS + 1)}, "characters at most"),
    ],
)
def test_wrong_keywords_are_errors(sampling: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        with_constraint(sampling)


def test_a_missing_library_is_an_error_that_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(json_tokenizer(), VOCABULARY, (END,))
    monkeypatch.setattr(compiling, "installed", lambda name: False)
    with pytest.raises(InputError, match=r'^structured output needs xgrammar or llguidance: pip install "windfall'):
        grammars.compile(Constraint.regex("a"))
    monkeypatch.setattr(compiling, "installed", lambda name: name == "xgrammar")
    with pytest.raises(InputError, match=r"xgrammar does not support 'not'; llguidance may: pip install"):
        grammars.compile(Constraint.json_schema({"not": {"type": "string"}}))


def test_what_one_library_ignores_goes_to_the_other() -> None:
    overlapping = Constraint.json_schema(
        {"allOf": [{"type": "integer", "minimum": 10}, {"type": "integer", "maximum": 12}]}
    )
    made = Grammars(json_tokenizer(), VOCABULARY, (END,)).compile(overlapping)
    assert type(made).__name__ == "LLGrammar"
    matcher = made.matcher()
    assert [TOKENS[token] for token in np.flatnonzero(matcher.mask())] == ["1"]


@both
@pytest.mark.parametrize(
    "endless",
    [
        Constraint.ebnf('root ::= "a" root'),
        Constraint.json_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        Constraint.regex("((a{9}){99}){99}"),
    ],
)
def test_text_without_an_end_is_followed_step_by_step(
    name: str, endless: Constraint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking the libraries for all text that must come next takes forever here. llguidance gives up on two of them, and
    takes a second for each token of the third."""
    monkeypatch.setattr(following, "MAX_SECONDS", 0.5)
    text = guide(endless, name)
    text.begin([])
    if name == "llguidance":
        with pytest.raises(InputError, match=r"^the grammar cannot be followed: [^\n]+$"):
            text.add_forced(DraftTree.root(0), torch.tensor([0]), room=100)
        return
    grown, kept = text.add_forced(DraftTree.root(0), torch.tensor([0]), room=100)
    assert 3 < len(grown) == len(kept) <= 33


@pytest.mark.parametrize("schema", [{"required": 5}, {"enum": 3}, {"properties": []}, {"allOf": 5}, {"type": {}}])
def test_what_is_no_schema_is_refused_or_harmless(schema: dict[str, object]) -> None:
    with contextlib.suppress(InputError):
        Grammars(json_tokenizer(), VOCABULARY, (END,)).compile(Constraint.json_schema(schema))


def test_an_error_names_what_both_libraries_lack() -> None:
    wrong = Constraint.json_schema({"oneOf": [{"type": "number"}, {"type": "integer"}]})
    with pytest.raises(InputError, match=r"xgrammar does not support 'oneOf' of .*; llguidance: oneOf"):
        Grammars(json_tokenizer(), VOCABULARY, (END,)).compile(wrong)


def test_compiled_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_KEPT", 2)
    grammars = Grammars(json_tokenizer(), VOCABULARY, (END,))
    one, two, three = (Constraint.regex(pattern) for pattern in "abc")
    first = grammars.compile(one)
    second = grammars.compile(two)
    assert grammars.compile(Constraint.regex("a")) is first
    grammars.compile(three)  # the second was not used for the longest time
    assert grammars.find(one) is first and grammars.find(two) is second  # which is still in use
    grammars.compile(Constraint.regex("d"))
    del second
    assert grammars.find(one) is first and grammars.find(two) is None


@pytest.mark.parametrize(
    ("schema", "ignored"),
    [
        (SCHEMA, ""),
        (True, ""),
        ({"$ref": "#/$defs/x", "description": "a", "$defs": {"x": {"type": "integer"}}}, ""),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "title": "x"}, ""),
        ({"type": "string", "enum": ["a"]}, ""),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ""),
        ({"properties": {"a": {"items": {"not": {}}}}}, "'not'"),
        ({"type": "integer", "enum": ["a"]}, "'type' beside 'enum'"),
        ({"$ref": "#/$defs/x", "minimum": 5}, "'minimum' beside '$ref'"),
        ({"$ref": "http://x/y"}, "a '$ref' that does not start with '#/'"),
        (
            {
                "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
                "discriminator": {"propertyName": "kind"},
                "$defs": {
                    name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
                    for name in ("a", "b")
                },
            },
            "",
        ),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "'oneOf' of schemas that may overlap"),
        ({"allOf": [{"type": "object"}, {"type": "object"}]}, "'allOf' of several schemas"),
        ({"minimum": 5}, "'minimum' without 'type'"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "'maxLength' beside 'pattern'"),
        ({"type": "string", "pattern": '"'}, "quotes and backslashes in a 'pattern'"),
        ({"type": "string", "pattern": "(?!a)"}, "lookahead and lookbehind"),
        ({"type": "number", "multipleOf": 2}, "'multipleOf' of numbers, of a fraction or beside bounds"),
        ({"type": "object", "required": ["a"]}, "'required' names that are not among the 'properties'"),
    ],
)
def test_what_xgrammar_ignores_is_known(schema: object, ignored: str) -> None:
    assert ignored_by_xgrammar(schema) == ignored


@pytest.mark.parametrize(
    ("pattern", "plain", "ignored"),
    [
        ("^a$", "a", ""),
        (r"a\$", r"a\$", ""),
        (r"[$^]+\^", r"[$^]+\^", ""),
        ("a$|b", "a$|b", "anchors inside a pattern"),
        ("(?<=a)b", "(?<=a)b", "lookahead and lookbehind"),
    ],
)
def test_anchors_of_patterns(pattern: str, plain: str, ignored: str) -> None:
    assert (without_anchors(pattern), ignored_in_regex(pattern)) == (plain, ignored)
