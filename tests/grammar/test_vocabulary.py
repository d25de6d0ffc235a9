"""The bytes of tokens, for every kind of tokenizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from helpers.grammars import TOKENS, json_tokenizer
from windfall.core.errors import InputError
from windfall.grammar.vocabulary import read_vocabulary

JSON = '{}[]":, 1abc'


def fast(vocabulary: list[str], decoder: Any, before: Any) -> transformers.PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(models.BPE({name: place for place, name in enumerate(vocabulary)}, []))
    backend.decoder, backend.pre_tokenizer = decoder, before
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def test_byte_level_tokens() -> None:
    names = ["</s>", *JSON.replace(" ", "Ġ"), "Ċ", "Ã", "ĠabĠ"]
    made = fast(names, decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.add_tokens(["<call>"])
    read = read_vocabulary(made, len(names) + 4, (0,))
    assert read.tokens == [
        b"",
        *(letter.encode() for letter in JSON),
        b"\n",
        b"\xc3",
        b" ab ",
        b"<call>",
        b"",
        b"",
        b"",
    ]


def test_tokens_with_byte_fallback() -> None:
    names = ["</s>", *JSON.replace(" ", "▁"), "<0x0A>", "<0xC3>", "▁ab"]
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made = fast(names, decoder, pre_tokenizers.Metaspace(prepend_scheme="never"))
    assert read_vocabulary(made, len(names), ()).tokens == [
        b"", *(letter.encode() for letter in JSON), b"\n", b"\xc3", b" ab",
    ]  # fmt: skip


def test_tokens_of_other_tokenizers_are_found_by_decoding() -> None:
    read = read_vocabulary(json_tokenizer(), 61, (3,))
    assert read.tokens == [b""] * 4 + [token.encode() for token in TOKENS[4:]] + [b""] * (61 - len(TOKENS))


def test_a_tokenizer_without_a_vocabulary_is_read_by_decoding() -> None:
    def decode(ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + token) for token in ids)

    made = SimpleNamespace(decode=decode)
    assert read_vocabulary(made, 4, (1,)).tokens == [b"a", b"", b"c", b"d"]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "structured output needs a tokenizer"),
        (SimpleNamespace(decode=lambda ids, **_: ""), "this tokenizer does not tell"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(tokenizer: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_vocabulary(tokenizer, 4, ())


def test_text_is_split_into_the_longest_tokens() -> None:
    read = read_vocabulary(json_tokenizer(), 61, (3,))
    assert [TOKENS[token] for token in read.split(b'{"abc": true}')] == ['{"', "ab", "c", '": ', "true", "}"]
    assert [TOKENS[token] for token in read.split(b"a\xffb")] == ["a"]
