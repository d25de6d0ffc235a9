"""`windfall generate` with a schema, a pattern or a grammar."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from helpers.cli import refused, windfall
from helpers.grammars import SCHEMA, json_tokenizer
from helpers.tiny import tiny
from windfall.grammar import compile as compiling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models") / "json"
    tiny(num_hidden_layers=2).save_pretrained(place)
    json_tokenizer().save_pretrained(place)
    return place


def generated(folder: Path, *options: object) -> str:
    result = windfall(
        "generate", "a cab", "--target", folder, "--policy", "beam", "--drafter", "ngram", "--json", *options
    )
    told = json.loads(result.stdout)
    assert told["finish_reason"] == "stop"
    return told["text"]


def test_text_follows_a_file_or_a_pattern(folder: Path, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('root ::= "la" "la"')
    jsonschema.validate(json.loads(generated(folder, "--json-schema", schema)), SCHEMA)
    assert generated(folder, "--ebnf", grammar, "--grammar-backend", "llguidance") == "lala"
    assert generated(folder, "--regex", "ca[bd]", "--temperature", "1", "--seed", "3") in ("cab", "cad")
    compared = windfall(
        "generate", "a cab", "--target", folder, "--policy", "beam", "--compare", "--json", "--json-schema", schema
    )
    assert json.loads(compared.stdout)["equal"] is True


def test_prompts_of_a_file_follow_it_too(folder: Path, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    windfall(
        "generate", "--file", prompts, "--out", answers, "--target", folder, "--policy", "none", "--regex", "[ab]{3}"
    )
    assert all(len(json.loads(line)["text"]) == 3 for line in answers.read_text().splitlines())


def test_resume_refuses_answers_that_follow_another_schema(folder: Path, tmp_path: Path) -> None:
    prompts, answers, schema = (tmp_path / name for name in ("prompts.jsonl", "answers.jsonl", "schema.json"))
    prompts.write_text('{"prompt": "a"}\n')
    schema.write_text('{"enum": [1]}')
    at = ("generate", "--file", prompts, "--out", answers, "--target", folder, "--policy", "none")
    assert windfall(*at, "--json-schema", schema).exit_code == 0
    assert windfall(*at, "--json-schema", schema, "--resume").exit_code == 0
    schema.write_text('{"enum": [2]}')
    said = refused(*at, "--json-schema", schema, "--resume")
    assert said.endswith("was made with other options: --json-schema; give the same, or another --out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--regex", "a", "--json-object"], "give one of json_object, regex"),
        (["--json-schema", "missing.json"], "cannot read 'missing.json'"),
        (["--json-schema", "WRONG"], "json_schema is not valid JSON"),
        (["--regex", "a", "--grammar-backend", "x"], "grammar_backend is xgrammar or llguidance"),
        (["--regex", "["], "the regular expression cannot be used: "),
    ],
)
def test_wrong_options_are_errors(folder: Path, tmp_path: Path, options: list[str], words: str) -> None:
    (tmp_path / "wrong").write_text("{")
    given = [str(tmp_path / "wrong") if option == "WRONG" else option for option in options]
    assert words in refused("generate", "a", "--target", folder, "--policy", "none", *given)


def test_a_missing_library_is_named_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "installed", lambda name: False)
    assert refused("generate", "a", "--target", "nowhere", "--regex", "a").endswith('pip install "windfall[grammar]"')
