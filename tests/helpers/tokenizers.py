"""Tiny tokenizers of the common kinds."""

from __future__ import annotations

from typing import Any

import tokenizers
import transformers


def fast(backend: tokenizers.Tokenizer) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def byte_level() -> Any:
    pieces = ["a", "Ġb", "ðŁ", "ĺĢ", "Ã©", "<end>"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return fast(backend)


def single_bytes(template: str) -> Any:
    """A tokenizer with a token for each byte and this chat template."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    made = fast(backend)
    made.chat_template = template
    return made


def sentence_pieces() -> Any:
    vocabulary = {piece: i for i, piece in enumerate(["▁a", "▁b", "c", "<0xF0>", "<0x9F>", "<unk>", "<end>"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    return fast(backend)
