"""The fewest tokens that a text can have, which is known without tokenizing it: that takes seconds for a long text."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping
from typing import Any

from windfall.core.byte_letters import as_bytes, byte_letters

NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")  # of Unicode; they leave ASCII text as it is
KEEPING = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts")  # pre-tokenizers, see `_keeps`
BYTES = {*range(0xC0), *range(0xC2, 0xF5)}  # that occur in UTF-8
NOT_ALPHANUMERIC = bytes({*range(256)} - {*(string.ascii_letters + string.digits).encode()})


class FewestTokens:
    """Counts a text's bytes in units of the longest token, and its ASCII letters and digits in units of the token with
    the most of them. The longest tokens are mostly spaces or dashes, so the second number often tells more."""

    def __init__(self, tokens: Iterable[bytes], ascii_only: bool = False, dropped: bytes = b""):
        """`tokens`: of the vocabulary; `ascii_only`: other texts may become shorter before they are tokenized;
        `dropped`: bytes that the tokenizer may leave out."""
        known = [*tokens]
        self.longest = max(map(len, known), default=0)
        self.most_alphanumeric = max((len(each.translate(None, NOT_ALPHANUMERIC)) for each in known), default=0)
        self._ascii_only, self._dropped = ascii_only, dropped

    def of(self, text: str) -> int:
        """The text has at least this number of tokens; 0: nothing is known."""
        if self._ascii_only and not text.isascii():
            return 0
        kept = text.encode(errors="replace").translate(None, self._dropped)
        alphanumeric = len(kept.translate(None, NOT_ALPHANUMERIC))
        return max(_units(len(kept), self.longest), _units(alphanumeric, self.most_alphanumeric))


def _units(count: int, size: int) -> int:
    """The units of this size that are needed for a number of bytes."""
    return -(-count // size) if size else 0


def fewest_tokens(tokenizer: Any) -> FewestTokens | None:
    """The limits of a tokenizer, if each of its tokens stands for no more text than its own name; else None.

    So it is for byte-pair encoding of bytes, if nothing is removed before. An added token may take the spaces around
    it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(tokenizer).__call__.__qualname__ != "PreTrainedTokenizerBase.__call__":
        return None
    normalizers = _parts(backend.normalizer, "normalizers")
    pre_tokenizers = _parts(backend.pre_tokenizer, "pretokenizers")
    takes_spaces = any(added.lstrip or added.rstrip for added in tokenizer.added_tokens_decoder.values())
    if takes_spaces or not all(map(_keeps, pre_tokenizers)) or type(backend.model).__name__ != "BPE":
        return None
    forms = [each for each in normalizers if each["type"] in NORMAL_FORMS]
    if not all(each in forms or _lengthens(each) for each in normalizers):
        return None
    names: Mapping[str, int] = tokenizer.get_vocab()
    if any(each["type"] == "ByteLevel" for each in pre_tokenizers):
        dropped = bytes(byte for letter, byte in byte_letters().items() if letter not in names)
        return FewestTokens(map(as_bytes, names), bool(forms), dropped)
    if not (backend.model.byte_fallback and all(f"<0x{byte:02X}>" in names for byte in BYTES)):
        return None
    return FewestTokens((name.encode(errors="replace") for name in names), bool(forms))


def _parts(part: Any, name: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as plain data; the parts of a sequence."""
    if part is None:
        return []
    about = json.loads(part.__getstate__())
    return [*about[name]] if about["type"] == "Sequence" else [about]


def _lengthens(normalizer: dict[str, Any]) -> bool:
    """Whether a normalizer only adds text, or replaces a space."""
    if normalizer["type"] == "Replace":
        return normalizer["pattern"] == {"String": " "} and bool(normalizer["content"])
    return bool(normalizer["type"] == "Prepend")


def _keeps(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer removes nothing."""
    return pre_tokenizer["type"] in KEEPING and pre_tokenizer.get("behavior") != "Removed"
