"""Grammars of xgrammar."""

from __future__ import annotations

import json
import re

import numpy as np
import torch
import xgrammar

from windfall.core.constraint import Constraint
from windfall.core.errors import InputError
from windfall.core.tree import Flags
from windfall.grammar.limits import ignored_by_xgrammar, ignored_in_regex, without_anchors
from windfall.grammar.tagged import lark
from windfall.grammar.vocabulary import Vocabulary

PLACE = re.compile(r"^\[[0-9:]+\] \S+: (?:Check failed: \(.*?\) is false: )?")  # of an error in xgrammar's own code


class XMatcher:
    """The state of one text."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, size: int):
        self._matcher, self._size = xgrammar.GrammarMatcher(compiled), size
        self._bits = torch.zeros(1, -(-(size + 1) // 32), dtype=torch.int32)

    def advance(self, token: int) -> None:
        if not self._matcher.accept_token(token):
            raise ValueError(f"the grammar does not allow token {token} here")

    def undo(self, tokens: int) -> None:
        if tokens:
            self._matcher.rollback(tokens)

    def legal(self, token: int) -> bool:
        accepted = self._matcher.accept_token(token)
        if accepted:
            self._matcher.rollback(1)
        return bool(accepted)

    def mask(self) -> Flags:
        self._bits.fill_(-1)
        self._matcher.fill_next_token_bitmask(self._bits)
        return np.unpackbits(self._bits[0].numpy().view(np.uint8), count=self._size, bitorder="little").view(bool)

    @property
    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())


class XGrammar:
    """A compiled grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary):
        self._compiled, self.vocabulary = compiled, vocabulary

    def matcher(self) -> XMatcher:
        return XMatcher(self._compiled, len(self.vocabulary))


class XGrammarBackend:
    """xgrammar with the vocabulary of a model."""

    def __init__(self, vocabulary: Vocabulary):
        """The library wants a token that ends a text. It gets one that no model has: the Guide ends texts."""
        self._vocabulary, end = vocabulary, len(vocabulary)
        raw = xgrammar.VocabType.RAW
        about = xgrammar.TokenizerInfo([*vocabulary.tokens, b""], raw, vocab_size=end + 1, stop_token_ids=[end])
        self._compiler = xgrammar.GrammarCompiler(about, cache_enabled=False)

    def unsupported(self, constraint: Constraint) -> str:
        if constraint.kind == "regex":
            return ignored_in_regex(constraint.source)
        if constraint.kind == "json_schema":
            return ignored_by_xgrammar(json.loads(constraint.source))
        return ignored_by_xgrammar(json.loads(constraint.source)["schema"]) if constraint.kind == "tagged_json" else ""

    def compile(self, constraint: Constraint) -> XGrammar:
        try:
            return XGrammar(self._compile(constraint), self._vocabulary)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = PLACE.sub("", str(error).strip()).partition("\n")[0]
            raise InputError(f"the {constraint.name} cannot be used: {reason}") from None

    def _compile(self, constraint: Constraint) -> xgrammar.CompiledGrammar:
        if constraint.kind == "regex":
            return self._compiler.compile_regex(without_anchors(constraint.source))
        if constraint.kind == "ebnf":
            return self._compiler.compile_grammar(constraint.source)
        if constraint.kind == "json_schema":
            return self._compiler.compile_json_schema(constraint.source, any_whitespace=False)
        parts = json.loads(constraint.source)
        inner = xgrammar.Grammar.from_json_schema(json.dumps(parts["schema"]), any_whitespace=False)
        return self._compiler.compile_lark(lark(parts, "@json"), named_grammars={"json": inner})
