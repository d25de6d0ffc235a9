"""The letters for bytes in byte-level vocabularies, those of GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache


@cache
def byte_letters() -> Mapping[str, int]:
    """The byte of each letter."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in own]
    return {chr(value): value for value in own} | {chr(256 + place): value for place, value in enumerate(others)}


@cache
def _latin_letters() -> Mapping[int, str]:
    """For `str.translate`: the letter of each byte in Latin-1; letters of no byte become one that Latin-1 lacks."""
    known = {ord(letter): chr(value) for letter, value in byte_letters().items()}
    return dict.fromkeys(range(256), "\uffff") | known


def as_bytes(name: str) -> bytes:
    """The bytes of a token with this name; a name with other letters is a text."""
    try:
        return name.translate(_latin_letters()).encode("latin-1")
    except UnicodeEncodeError:
        return name.encode(errors="replace")
