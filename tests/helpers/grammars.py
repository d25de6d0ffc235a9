"""Tiny models that can write JSON, and plain decoding with masked logits by transformers."""

from __future__ import annotations

import random
import string
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from helpers.cli import word_tokenizer
from helpers.random_parallel import some_drafter
from helpers.tiny import VOCABULARY, tiny
from windfall import registry
from windfall.core.constraint import Constraint, with_constraint
from windfall.core.types import SamplingParams
from windfall.engine.engine import Engine
from windfall.grammar.compile import make_backend
from windfall.grammar.guide import Guide
from windfall.grammar.vocabulary import Vocabulary, read_vocabulary
from windfall.model.target import Target

SPECIAL = ["<unk>", "<|user|>", "<|assistant|>", "<|end|>"]
LONGER = ['{"', '": ', '", "', "true", '"}', "ab", "<tool_call>"]
OTHERS = [*'{}[]":,-. \n', *string.digits, *string.ascii_lowercase[:21], *LONGER, *"<>/_;"]
TOKENS = [*SPECIAL, *OTHERS]
END = TOKENS.index("<|end|>")
assert len(TOKENS) < VOCABULARY  # so that there are logits without tokens

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cab"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
SLOW_SCHEMA = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2500)}}  # to compile
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": SCHEMA},
    "regex": {"regex": "(ab|c){2,5}-[0-9]+(, (ab|c))*"},
    "ebnf": {"ebnf": 'root ::= item (", " item)* "."\nitem ::= "a" [b-f]{2,4} | [0-9]+'},
}


def json_tokenizer() -> transformers.PreTrainedTokenizerFast:
    return word_tokenizer(SPECIAL, OTHERS)


@cache
def target() -> Target:
    return Target(tiny(num_hidden_layers=4), json_tokenizer(), "tiny")


def engine(policy: str = "beam", drafter: str = "self", **options: Any) -> Engine:
    made = {"nodes": 12, "k": 3, "depth": 4} if policy == "beam" else {}
    return Engine(target(), some_drafter(drafter), registry.policy(policy, **made), **options)


@cache
def vocabulary() -> Vocabulary:
    return read_vocabulary(json_tokenizer(), VOCABULARY, (END,))


@cache
def backend(name: str) -> Any:
    return make_backend(name, vocabulary())


def guide(constraint: Constraint, name: str = "xgrammar", eos: tuple[int, ...] = (END,)) -> Guide:
    return Guide(backend(name).compile(constraint), eos)


def ids(text: str) -> list[int]:
    """The tokens of a text, one for each character."""
    return [TOKENS.index(letter) for letter in text]


def text_of(tokens: list[int]) -> str:
    return "".join(TOKENS[token] for token in tokens if token != END)


class MaskedLogits(transformers.LogitsProcessor):
    """Excludes what a grammar forbids, with a new guide for each token."""

    def __init__(self, constraint: Constraint, prompt_length: int, name: str):
        self.constraint, self.prompt_length, self.name = constraint, prompt_length, name

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        text = guide(self.constraint, self.name)
        text.follow(input_ids[0, self.prompt_length :].tolist())
        return scores.masked_fill(~torch.from_numpy(text.mask()), -torch.inf)


def plain_greedy(prompt: list[int], tokens: int, name: str = "xgrammar", **given: Any) -> list[int]:
    """What transformers writes under a constraint."""
    constraint = SamplingParams(**with_constraint(given)).constraint
    assert constraint is not None
    output = target().model.generate(
        input_ids=torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=END, pad_token_id=0,
        logits_processor=[MaskedLogits(constraint, len(prompt), name)],
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def random_schema(choose: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema of any kind whose texts are short."""
    small = ["string", "enum", "pattern", "integer", "number", "boolean", "null", "const"]
    kind = choose.choice([*small, *(["object", "object", "array", "anyOf"] if depth else [])])
    if kind == "object":
        names = choose.sample(["a", "bc", "name", "id", "k"], choose.randint(0, 3))
        made: dict[str, Any] = {"type": "object", "properties": {n: random_schema(choose, depth - 1) for n in names}}
        return {**made, "required": choose.sample(names, choose.randint(0, len(names))), "additionalProperties": False}
    low = choose.randint(-20, 20)
    return {
        "string": lambda: {"type": "string", "minLength": choose.randint(0, 2), "maxLength": choose.randint(2, 4)},
        "enum": lambda: {"enum": choose.sample(["a", "bad", 1, -3, None, True, "", "no"], choose.randint(1, 4))},
        "pattern": lambda: {
            "type": "string",
            "pattern": choose.choice(["^[a-c]{1,3}$", "^(ab|cd){1,3}e$", "^[0-9]{2}$"]),
        },
        "integer": lambda: {"type": "integer", "minimum": low, "maximum": low + choose.randint(0, 200)},
        "number": lambda: {"type": "number", "minimum": 0, "maximum": 9},
        "boolean": lambda: {"type": "boolean"},
        "null": lambda: {"type": "null"},
        "const": lambda: {"const": choose.choice(["dab", 12, False])},
        "array": lambda: {"type": "array", "items": random_schema(choose, depth - 1), "minItems": 0, "maxItems": 3},
        "anyOf": lambda: {"anyOf": [random_schema(choose, depth - 1) for _ in range(2)]},
    }[kind]()
