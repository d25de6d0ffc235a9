"""The text of every token of a model, as bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from windfall.core.byte_letters import as_bytes
from windfall.core.errors import InputError

REPLACEMENT = "\ufffd"  # what bytes that are no whole character decode to
SPACE = "▁"  # of SentencePiece
PROBE = '{"a": [1, "b c"]}'  # its tokens must decode to what their bytes say
BYTE_TOKENS = {f"<0x{value:02X}>": bytes([value]) for value in range(256)}


class Vocabulary:
    """The bytes of each token id. Ids without text, such as special tokens and padding of the logits, have none."""

    def __init__(self, tokens: list[bytes]):
        if not any(tokens):
            raise InputError("structured output needs the texts of the tokens, which this tokenizer does not tell")
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {text: token for token, text in reversed([*enumerate(self.tokens)]) if text}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.tokens))

    def split(self, text: bytes) -> list[int]:
        """Tokens that spell a text: always the longest that fits. Ends where no token fits."""
        tokens, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            found = next((size for size in sizes if text[at : at + size] in self._ids), None)
            if found is None:
                break
            tokens.append(self._ids[text[at : at + found]])
            at += found
        return tokens


def read_vocabulary(tokenizer: Any, size: int, eos: Iterable[int]) -> Vocabulary:
    """The vocabulary of a model with `size` logits; `eos` tokens have no text."""
    if tokenizer is None:
        raise InputError("structured output needs a tokenizer; this target has none")
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    special = {token for token, content in added.items() if getattr(content, "special", False)}
    special |= {*(getattr(tokenizer, "all_special_ids", None) or ()), *eos}
    tokens = _by_name(tokenizer, size) if hasattr(tokenizer, "get_vocab") else None
    if tokens is None or not _decodes_as(tokenizer, tokens):
        tokens = _by_decoding(tokenizer, size, special)
    else:
        for token, content in added.items():
            if token < size:
                tokens[token] = str(content).encode()
    for token in special:
        if 0 <= token < size:
            tokens[token] = b""
    return Vocabulary(tokens)


def _by_name(tokenizer: Any, size: int) -> list[bytes] | None:
    """The bytes that the names of the tokens stand for; None if it is not known how to read them."""
    names: Mapping[str, int] = tokenizer.get_vocab()
    kinds = _decoders(tokenizer)
    if "ByteLevel" in kinds:
        made = {token: as_bytes(name) for name, token in names.items()}
    elif {"ByteFallback", "Metaspace"} & kinds or "<0x0A>" in names:
        made = {
            token: BYTE_TOKENS.get(name) or name.replace(SPACE, " ").encode(errors="replace")
            for name, token in names.items()
        }
    else:
        return None
    return [made.get(token, b"") for token in range(size)]


def _decoders(tokenizer: Any) -> set[str]:
    """The kinds of decoders that a fast tokenizer has."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return set()
    about = json.loads(decoder.__getstate__())
    return {part["type"] for part in (about, *about.get("decoders", ()))}


def _decodes_as(tokenizer: Any, tokens: list[bytes]) -> bool:
    """Whether the tokenizer decodes a text as these bytes say."""
    ids = list(tokenizer(PROBE, add_special_tokens=False).input_ids)
    if not all(0 <= token < len(tokens) for token in ids):
        return False
    return bool(b"".join(tokens[token] for token in ids).strip() == _decode(tokenizer, ids).strip().encode())


def _by_decoding(tokenizer: Any, size: int, special: set[int]) -> list[bytes]:
    """What each token adds to the text of another token. This works with every tokenizer, but is slow."""
    known: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    usable = [token for token in (sorted(known.values()) if known else range(size)) if token < size]
    usable = [token for token in usable if token not in special]
    anchor = next((token for token in usable if _is_anchor(tokenizer, token)), None)
    before = [] if anchor is None else [anchor]
    start, tokens = _decode(tokenizer, before), [b""] * size
    for token in usable:
        text = _decode(tokenizer, [*before, token])
        if text.startswith(start) and REPLACEMENT not in text:
            tokens[token] = text[len(start) :].encode(errors="replace")
    return tokens


def _is_anchor(tokenizer: Any, token: int) -> bool:
    text = _decode(tokenizer, [token])
    return text.isalnum() and _decode(tokenizer, [token, token]).startswith(text)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    try:
        text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):  # an id that it does not have
        return ""
    return text
