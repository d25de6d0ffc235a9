"""The text and the bytes of single tokens."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

from windfall.core.detokenizer import REPLACEMENT

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a single byte


class TokenText(NamedTuple):
    """What a token adds to a text."""

    text: str  # if the bytes are not whole characters: each as \xNN
    bytes: bytes
    whole: bool = True  # whether the bytes are whole characters


class TokenTexts:
    """Texts by token. A token has the text that it adds in the middle of a text; special tokens have their names."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}
        self._before: list[int] = list(tokenizer("a", add_special_tokens=False).input_ids)[-1:]
        self._skipped = len(self._decode(self._before))  # some tokenizers drop a space at the start of a text

    def __getitem__(self, token: int) -> TokenText:
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> TokenText:
        text = self._decode([*self._before, token])[self._skipped :]
        data = raw_bytes(self.tokenizer.convert_ids_to_tokens(token)) if REPLACEMENT in text else text.encode()
        if data is None:
            return TokenText(text, text.encode())
        try:
            return TokenText(data.decode(), data)
        except UnicodeDecodeError:
            return TokenText("".join(f"\\x{byte:02x}" for byte in data), data, whole=False)

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def raw_bytes(piece: str | None) -> bytes | None:
    """The bytes that a piece of a tokenizer's vocabulary stands for; None if its form is not known."""
    if piece is None:
        return None
    if found := BYTE_PIECE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    known = byte_characters()
    return bytes(known[character] for character in piece) if all(each in known for each in piece) else None


@cache
def byte_characters() -> dict[str, int]:
    """The characters that stand for bytes in vocabularies of byte-level BPE, as GPT-2 defined them."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{chr(byte): byte for byte in shown}, **{chr(256 + place): byte for place, byte in enumerate(hidden)}}
