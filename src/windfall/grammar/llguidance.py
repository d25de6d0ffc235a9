"""Grammars of llguidance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark
from llguidance.numpy import fill_next_token_bitmask

from windfall.core.constraint import Constraint
from windfall.core.errors import InputError
from windfall.core.tree import Flags
from windfall.grammar.limits import ignored_by_llguidance, without_anchors
from windfall.grammar.tagged import lark
from windfall.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

END_TEXT = b"<end>"  # of a token that no model has; the Guide ends texts
JSON_STYLE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class LLMatcher:
    """The state of one text. Its mask is the truth: it leaves out unusual spellings of text that must come next."""

    def __init__(self, matcher: llguidance.LLMatcher, size: int):
        self._matcher, self._size = matcher, size
        self._bits = np.zeros((1, -(-(size + 1) // 32)), np.int32)
        self._mask: Flags | None = None  # of the present state

    def advance(self, token: int) -> None:
        self._mask = None
        if not self._matcher.consume_token(token):
            raise self._failure()

    def undo(self, tokens: int) -> None:
        self._mask = None
        if tokens and not self._matcher.rollback(tokens):
            raise self._failure()

    def _failure(self) -> InputError:
        """The library gives up on grammars that are too complex, or whose texts never end."""
        return InputError(f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}")

    def legal(self, token: int) -> bool:
        if self._mask is None:
            self._mask = self.mask()
        return bool(self._mask[token])

    def mask(self) -> Flags:
        fill_next_token_bitmask(self._matcher, self._bits)
        return np.unpackbits(self._bits[0].view(np.uint8), count=self._size, bitorder="little").view(bool)

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()


class LLGrammar:
    """A compiled grammar."""

    def __init__(self, compiled: llguidance.LLMatcher, vocabulary: Vocabulary):
        self._compiled, self.vocabulary = compiled, vocabulary

    def matcher(self) -> LLMatcher:
        return LLMatcher(self._compiled.deep_copy(), len(self.vocabulary))


class LLGuidanceBackend:
    """llguidance with the vocabulary of a model."""

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokenizer(vocabulary)))

    def unsupported(self, constraint: Constraint) -> str:
        """Little: the library refuses most of what it does not support."""
        if constraint.kind == "json_schema":
            return ignored_by_llguidance(json.loads(constraint.source))
        return (
            ignored_by_llguidance(json.loads(constraint.source)["schema"]) if constraint.kind == "tagged_json" else ""
        )

    def compile(self, constraint: Constraint) -> LLGrammar:
        try:
            made = llguidance.LLMatcher(self._tokenizer, _source(constraint), log_level=0)
        except Exception as error:  # of the conversion to its own form
            raise InputError(f"the {constraint.name} cannot be used: {_first_line(str(error))}") from None
        if made.is_error():
            raise InputError(f"the {constraint.name} cannot be used: {_first_line(made.get_error())}")
        return LLGrammar(made, self._vocabulary)


class _Tokenizer:
    """What llguidance has to know about a tokenizer."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary, self.eos_token_id = vocabulary, len(vocabulary)
        self.tokens, self.special_token_ids = [*vocabulary.tokens, END_TEXT], [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        return self._vocabulary.split(text if isinstance(text, bytes) else text.encode())


def _source(constraint: Constraint) -> str:
    if constraint.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(without_anchors(constraint.source))
    if constraint.kind == "ebnf":
        return llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(constraint.source))
    if constraint.kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(constraint.source, overrides=JSON_STYLE)
    parts = json.loads(constraint.source)
    inner = json.dumps({**parts["schema"], "x-guidance": JSON_STYLE})
    return llguidance.LLMatcher.grammar_from_lark(lark(parts, f"%json {inner}"))


def _first_line(message: str) -> str:
    """The line of a message that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "unknown error")
